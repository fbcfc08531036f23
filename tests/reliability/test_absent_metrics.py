"""What a run does not measure is in no log, line, table or plot, and may appear later, on resuming too."""

import json
from pathlib import Path

import pytest

GUESS = f"{Path(__file__).parents[2] / 'docs' / 'example_environment.py'}:Guess"


@pytest.mark.slow
def test_kl_without_a_reference_is_absent_and_appears_once_there_is_one(paw_here, tiny_llm, tmp_path):
    settings = {
        "model.path": tiny_llm(tmp_path / "model"), "model.dtype": "float32", "run.dir": tmp_path, "run.name": "run",
        "run.updates": 1, "run.threads": 1, "env.name": GUESS, "env.max_turns": 2, "env.invalid_penalty": 0.1,
        "rollout.tasks": 2, "rollout.group_size": 4, "rollout.engine": "transformers",
        "rollout.max_response_tokens": 4, "eval.games": 2, "advantage.penalty_only": "keep", "wm.loss": "ce",
        "policy.kl_coef": 0,
    }  # fmt: skip
    recipe, run = tmp_path / "guess.toml", tmp_path / "run"
    recipe.write_text('[model]\npath = "-"\n')
    done = paw_here("train", recipe, settings)
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert first["wm/loss"] > 0 and "policy/entropy" in first
    # KL without a reference, the mask of a loss without one, an engine without a cache
    absent = {"policy/kl", "wm/masked_frac", "perf/cached_frac"}
    assert not first.keys() & absent and "  kl " not in done.stdout
    paw_here("report", run)
    page = (run / "report.html").read_text()
    assert "policy/entropy" in page and not any(key in page for key in absent)
    assert not (run / "plots" / "policy_kl.png").exists() and (run / "plots" / "policy_entropy.png").exists()

    done = paw_here("train", recipe, settings | {"policy.kl_coef": 0.1, "run.updates": 2}, "--resume", "auto")
    _, first, second = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "policy/kl" not in first and second["policy/kl"] >= 0 and "  kl " in done.stdout
