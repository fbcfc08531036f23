"""Runs the programs of examples/ in the process of a test."""

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import as_words

from paw.config.plugins import CALLBACKS

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "run.updates": 1,
    "run.threads": 1,
    "rollout.tasks": 2,
    "rollout.group_size": 4,
    "eval.games": 4,
    "eval.attempts": 1,
}
"""Settings with which an example only takes seconds."""
SMALL_WARMUP = {"warmup.max_steps": 10, "warmup.corpus_turns": 200}


def in_their_folder(patch: pytest.MonkeyPatch, cache: str, folder: Path) -> None:
    """Let examples import each other and write to `folder`.

    To save time, they make no report, and a warm-up is measured with few games.
    """
    patch.syspath_prepend(EXAMPLES)
    patch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
    patch.setenv("PAW_CACHE", cache)
    patch.setitem(CALLBACKS, "report", "builtins:object")
    patch.setattr("paw.tools.warmup.warmup.CHECK_GAMES", 8)
    patch.chdir(folder)
    for file in EXAMPLES.glob("*.py"):
        patch.delitem(sys.modules, file.stem, raising=False)


def run_example(patch: pytest.MonkeyPatch, name: str, settings: Mapping[str, Any]) -> int:
    """Run `python examples/NAME.py --a.b 1 ...` and return the exit code."""
    patch.setattr(sys, "argv", [f"{name}.py", *as_words(settings)])
    with pytest.raises(SystemExit) as exited:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return int(exited.value.code or 0)
