"""Every promise of docs/reliability.md names a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_promise_has_its_test():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/\S+?\.py)::(\w+)`", page)
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"
    assert len(re.findall(r"^\| (?!promise|---)(.+) \|$", page, flags=re.M)) == len(named) >= 20
