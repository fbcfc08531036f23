"""The recipes for WebShop, search QA and maths problems with several attempts train with PaW,
starting with the warm-up."""

import json
import math

import pytest
from jsonl import read_jsonl

from paw.checkpoint.push import EXPORTED

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "words", "steps"),
    [
        ("webshop", "see:\nshop", 4),
        ("search", "did:\nsearch", 40),
        pytest.param("maths", "wrong. Try again.", 4, marks=pytest.mark.long),
    ],
)
def test_an_environment_trains_with_paw(paw, quick, tmp_path, name, words, steps):
    """`words` occur only in prompts of this environment. `steps` is the smallest number of warm-up
    steps that teaches it to search."""
    settings = {
        "run.dir": tmp_path, "run.name": "run", "wm.alpha": 1.0, "run.updates": 1, "warmup.max_steps": steps,
        "rollout.tasks": 2, "eval.games": 2,
    }  # fmt: skip
    if name == "maths":
        settings["env.max_turns"] = 3
    # The session's cache holds another model.
    paw("train", f"{name}-quickstart", quick | settings, env={"PAW_CACHE": str(tmp_path)})
    run_folder = tmp_path / "run"
    before, metrics = read_jsonl(run_folder / "metrics.jsonl")
    assert before["eval/games"] == 2
    assert metrics["eval/games"] == 2
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["health/env_failures"] == 0
    assert metrics["health/groups_dropped"] == 0
    assert metrics["optim/grad_norm"] > 0
    assert metrics["wm/loss"] > 0
    exported = list((run_folder / "hf").iterdir())
    assert len(exported) > 5
    for file in exported:  # a push would send all of these files
        assert any(file.match(pattern) for pattern in EXPORTED)
    assert json.dumps(words)[1:-1] in (run_folder / "samples.jsonl").read_text()
