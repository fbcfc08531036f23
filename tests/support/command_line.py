"""Arguments of a command line."""

from collections.abc import Mapping
from typing import Any


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """`{"a.b": 1}` becomes `--a.b 1`."""
    arguments = []
    for key, value in settings.items():
        arguments += [f"--{key}", str(value)]
    return arguments
