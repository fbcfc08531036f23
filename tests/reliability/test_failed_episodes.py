"""Evaluation with failing environments: each failure is counted, shown and in the denominator;
if all fail, the run ends."""

import json

import pytest

from paw.rollouts.success import wilson

GAME = """
from paw.types import Outcome, Task

class Game:
    trained = False

    def __init__(self, config):
        pass

    def tasks(self, split, seed):
        return [Task(f"{{split}}/{{n}}", "guess", n) for n in range(8)]

    def make(self):
        return self

    def reset(self, task):
        self.trained = self.trained or task.id.startswith("train")
        if not task.id.startswith("train") and ({broken}):
            raise RuntimeError("boom")
        return "go"

    def context(self):
        return "Say anything."

    def step(self, response):
        return Outcome("well done", 1.0, done=True, won=True)
"""


@pytest.fixture
def environment(tmp_path):
    """`environment(expression)` writes a game won in one turn, whose evaluation fails if the
    expression is true; returns its key."""

    def write(broken):
        (tmp_path / "mine.py").write_text(GAME.format(broken=broken))
        return {"env.name": f"{tmp_path / 'mine.py'}:Game"}

    return write


@pytest.fixture
def train(paw_here, tiny_llm, tmp_path):
    """`train(...)` trains the model of the folder `model` in the directory `run`."""
    (tmp_path / "guess.toml").write_text('[model]\npath = "-"\n')
    settings = {
        "model.path": tiny_llm(tmp_path / "model"), "model.dtype": "float32", "run.dir": tmp_path, "run.name": "run",
        "run.updates": 1, "run.threads": 1, "env.max_turns": 1, "rollout.tasks": 2, "rollout.group_size": 2,
        "engine.type": "transformers", "rollout.max_response_tokens": 4, "eval.games": 8, "policy.kl_coef": 0,
    }  # fmt: skip
    return lambda *arguments, **options: paw_here(
        "train", tmp_path / "guess.toml", settings, *arguments, **options
    )


def read(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_failed_episodes_are_in_the_denominator_and_in_the_line(
    paw_here, environment, train, tmp_path
):
    finished = train(environment("task.payload % 4"))
    metrics = read(tmp_path / "run")
    assert len(metrics) == 2
    low, high = wilson(2, 8)
    for line in metrics:
        counts = [
            line[f"eval/{key}"]
            for key in ("games", "failures", "success", "success_guess", "ci_low", "ci_high")
        ]
        assert counts == [8, 6, 0.25, 0.25, low, high]
        assert line["eval/failure"] == "RuntimeError: boom"
        # of the episodes that were played
        assert line["eval/return"] == 1.0
        assert line["eval/steps"] == 1.0
    assert finished.stdout.count("eval 25.0% of 8 games, 6 failed (RuntimeError: boom)") == 2
    paw_here("report", tmp_path / "run")
    assert "12 environment failures in evaluation" in (tmp_path / "run" / "report.html").read_text()

    finished = paw_here("eval", tmp_path / "run", code=1)
    assert "success 25.0% of 8 games, 6 failed (RuntimeError: boom)" in finished.stdout
    assert "guess   25.0% of 8 " in finished.stdout
    assert finished.stderr.count("environment failed: ") == 6
    summary = json.loads(paw_here("eval", tmp_path / "run", "--json", code=1).stdout)
    assert summary["games"] == 8
    assert summary["failures"] == 6
    assert summary["success"] == 0.25
    assert summary["kinds"]["guess"]["games"] == 8
    # The way of agents.
    finished = paw_here("eval", tmp_path / "run", "--out", tmp_path / "agent", code=1)
    assert "6 episodes could not be played (RuntimeError: boom)" in finished.stderr


def test_an_evaluation_in_which_all_fail_ends_the_run_with_the_reason(
    paw_here, environment, train, tmp_path
):
    finished = train(environment("True"), code=2)  # nothing is trained where no game can be played
    assert "stopped at update 0: evaluation: none of 8 games, 8 failed" in finished.stderr
    assert [line["step"] for line in read(tmp_path / "run")] == [0]
    finished = paw_here("eval", tmp_path / "model", environment("True") | {"eval.games": 3}, code=1)
    assert "success none of 3 games, 3 failed (RuntimeError: boom)" in finished.stdout

    finished = train(environment("self.trained"), {"run.name": "second"}, code=2)
    reason = "none of 8 games, 8 failed (RuntimeError: boom)"
    assert (
        f"paw: stopped at update 1: evaluation: {reason}; the checkpoint of update 1 is intact"
        in finished.stderr
    )
    first_line, last_line = read(tmp_path / "second")
    assert last_line["eval/failures"] == 8
    assert last_line["eval/games"] == 8
    assert "eval/success" not in last_line
    assert "eval/success" in first_line
    assert (tmp_path / "second" / "checkpoints" / "step_000001").is_dir()
    train(environment("False"), {"run.name": "second", "run.updates": 2}, "--resume", "auto")
    assert [line["step"] for line in read(tmp_path / "second")] == [0, 1, 2]
