"""Every metric that appears in the code, the goldens or the pages is declared in
paw/metric_list.py."""

import ast
import json
import re
from pathlib import Path

from paw.metric_list import METRICS, page

ROOT = Path(__file__).parents[2]
NAMES = [metric.name for metric in METRICS]
PREFIXES = sorted({name.partition("/")[0] for name in NAMES})
NAME = re.compile(rf"(?:{'|'.join(PREFIXES)})/[a-z_]+")
FAMILIES = ("success/", "eval/success_")
"""Prefixes of metric names that end in a kind of task."""


def undeclared(metric_names):
    return {name for name in metric_names if name not in NAMES and not name.startswith(FAMILIES)}


def test_names_are_unique():
    assert len(set(NAMES)) == len(NAMES)


def test_the_page_is_written_from_the_list():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert text == page(), "python -m paw.metric_list > docs/metrics.md"


def test_names_in_the_code_are_declared():
    for path in (ROOT / "paw").rglob("*.py"):
        strings = {
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not undeclared(filter(NAME.fullmatch, strings)), path


def test_names_in_the_goldens_are_declared():
    goldens = json.loads((ROOT / "tests" / "goldens.json").read_text())
    names = {name for run in goldens.values() for line in run["metrics"] for name in line}
    assert not undeclared(names - {"step"})


def test_names_on_the_pages_are_declared():
    """Names stand in backticks, sometimes several in one pair: `policy/{loss,kl}`."""
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        names = set()
        for prefix, group, name in re.findall(
            rf"`({'|'.join(PREFIXES)})/(?:\{{([a-z_,]+)\}}|([a-z_]+))`", text
        ):
            names |= {f"{prefix}/{part}" for part in (group.split(",") if group else [name])}
        # wm/factor belongs to an experiment whose code is gone.
        assert not undeclared(names) - {"wm/factor"}, path
