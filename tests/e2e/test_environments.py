"""WebShop, search QA and maths problems in several tries, trained with PaW by their recipes, from
the warm-up on."""

import json
import math

import pytest

from paw.checkpoint.push import EXPORTED

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "words", "steps"),
    [
        ("webshop", "see:\nshop", 4),
        ("search", "did:\nsearch", 40),
        ("maths", "wrong. Try again.", 40),
    ],
)
def test_an_environment_trains_with_paw(paw, quick, tmp_path, name, words, steps):
    """`words`: of a prompt in no other environment.

    In fewer steps of the warm-up no search is learnt.
    """
    where = {
        "run.dir": tmp_path,
        "run.name": "run",
        "wm.alpha": 1.0,
        "run.updates": 1,
        "warmup.max_steps": steps,
    }
    where |= {"env.max_turns": 3} if name == "maths" else {}
    # The session's has one model.
    paw("train", f"{name}-quickstart", quick | where, env={"PAW_CACHE": str(tmp_path)})
    start, line = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert start["eval/games"] == line["eval/games"] == 8
    assert all(math.isfinite(value) for value in line.values())
    assert line["health/env_failures"] == 0 == line["health/groups_dropped"]
    assert line["optim/grad_norm"] > 0
    assert line["wm/loss"] > 0
    exported = list((tmp_path / "run" / "hf").iterdir())
    # What a push would send.
    assert len(exported) > 5
    assert all(any(map(file.match, EXPORTED)) for file in exported)
    assert json.dumps(words)[1:-1] in (tmp_path / "run" / "samples.jsonl").read_text()
