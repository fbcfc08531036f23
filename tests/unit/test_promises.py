"""Every promise of docs/reliability.md names a test that exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(tests/\S+?\.py)::(\w+)`", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))


def test_a_promise_has_its_test():
    for file, name in NAMED:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_every_line_of_a_table_names_one():
    rows = re.findall(r"^\| (?!promise|---)(.+) \|$", (ROOT / "docs" / "reliability.md").read_text(), flags=re.M)
    assert len(rows) == len(NAMED) >= 20
