"""The examples of docs/python.md run, with settings that make a run a matter of seconds."""

import re
import runpy
from pathlib import Path

import pytest

import paw
from paw.plugins import CALLBACKS

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.slow
def test_the_examples_run(quick, paw_env, tmp_path, monkeypatch):
    load, brief = paw.load, quick | {"run.updates": 1, "eval.games": 2}
    monkeypatch.setenv("PAW_CACHE", paw_env["PAW_CACHE"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paw, "load", lambda recipe, **changes: load(recipe, **{**changes, **brief}))
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "page.py").write_text("\n".join(examples))
    names = runpy.run_path("page.py")
    assert names["report"] == tmp_path / "runs" / "quickstart" / "report.html" and names["report"].is_file()
    assert names["watched"].is_file() and names["watched"].parent.name == "watched"
    monkeypatch.setitem(CALLBACKS, "report", "builtins:object")  # takes seconds, and two were written
    assert paw.train(names["config"]).parent.name == "centred"
