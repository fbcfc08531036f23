"""Every environment beside ALFWorld, trained with PaW by its own recipe, from the warm-up to the report."""

import importlib.util
import json
import math

import pytest

pytestmark = pytest.mark.slow
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
WORDS = {"webshop": "see:\nshop", "search": "did:\nsearch"}
"""Of a prompt in no other environment."""


@pytest.mark.parametrize("name", ["webshop", "search"])
def test_an_environment_trains_with_paw(paw, quick, tmp_path, name):
    engine = {"rollout.engine": "vllm"} if name == "search" and importlib.util.find_spec("vllm") else {}
    own = {"PAW_CACHE": str(tmp_path)}  # `quick_model` is to be alone in the shared one
    where = {"run.dir": tmp_path, "run.name": "run", "wm.alpha": 1.0}
    paw("train", f"{name}-quickstart", quick | engine | where, env=VLLM | own)
    run = tmp_path / "run"
    start, *updates = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert start["eval/games"] == updates[-1]["eval/games"] == 8 and len(updates) == 2
    for line in updates:
        assert all(math.isfinite(value) for value in line.values())
        assert line["health/env_failures"] == 0 == line["health/groups_dropped"]
        assert line["optim/grad_norm"] > 0 and line["wm/loss"] > 0
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert any(WORDS[name] in turn["prompt"] for sample in samples for turn in sample["turns"])
    assert json.loads((run / "run.json").read_text())["engine"] == engine.get("rollout.engine", "transformers")
