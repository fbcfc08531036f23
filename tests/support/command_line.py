"""Arguments of a command line."""

from collections.abc import Mapping
from typing import Any


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """`{"a.b": 1}` becomes `--a.b 1`."""
    words = []
    for key, value in settings.items():
        words += [f"--{key}", str(value)]
    return words
