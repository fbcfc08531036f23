"""Evaluation where environments break: each failure is counted, shown and in the denominator; all of them end a run."""

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
    """`environment(expression)` writes a game won in one turn that fails in evaluation where that holds: its name."""

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
    return lambda *words, **options: paw_here(
        "train", tmp_path / "guess.toml", settings, *words, **options
    )


def read(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_failed_episodes_are_in_the_denominator_and_in_the_line(
    paw_here, environment, train, tmp_path
):
    done = train(environment("task.payload % 4"))
    found = read(tmp_path / "run")
    assert len(found) == 2
    low, high = wilson(2, 8)
    for line in found:
        counts = [
            line[f"eval/{key}"]
            for key in ("games", "failures", "success", "success_guess", "ci_low", "ci_high")
        ]
        assert (
            counts == [8, 6, 0.25, 0.25, low, high] and line["eval/failure"] == "RuntimeError: boom"
        )
        assert line["eval/return"] == line["eval/steps"] == 1.0  # of the episodes that were played
    assert done.stdout.count("eval 25.0% of 8 games, 6 failed (RuntimeError: boom)") == 2
    paw_here("report", tmp_path / "run")
    assert "12 environment failures in evaluation" in (tmp_path / "run" / "report.html").read_text()

    done = paw_here("eval", tmp_path / "run", code=1)
    assert "success 25.0% of 8 games, 6 failed (RuntimeError: boom)" in done.stdout
    assert "guess   25.0% of 8 " in done.stdout and done.stderr.count("environment failed: ") == 6
    summary = json.loads(paw_here("eval", tmp_path / "run", "--json", code=1).stdout)
    assert (summary["games"], summary["failures"], summary["success"]) == (8, 6, 0.25)
    assert summary["kinds"]["guess"]["games"] == 8
    # The way of agents.
    done = paw_here("eval", tmp_path / "run", "--out", tmp_path / "agent", code=1)
    assert "6 episodes could not be played (RuntimeError: boom)" in done.stderr


def test_an_evaluation_in_which_all_fail_ends_the_run_with_the_reason(
    paw_here, environment, train, tmp_path
):
    done = train(environment("True"), code=2)  # nothing is trained where no game can be played
    assert "stopped at update 0: evaluation: none of 8 games, 8 failed" in done.stderr
    assert [line["step"] for line in read(tmp_path / "run")] == [0]
    done = paw_here("eval", tmp_path / "model", environment("True") | {"eval.games": 3}, code=1)
    assert "success none of 3 games, 3 failed (RuntimeError: boom)" in done.stdout

    done = train(environment("self.trained"), {"run.name": "second"}, code=2)
    reason = "none of 8 games, 8 failed (RuntimeError: boom)"
    assert (
        f"paw: stopped at update 1: evaluation: {reason}; the checkpoint of update 1 is intact"
        in done.stderr
    )
    start, last = read(tmp_path / "second")
    assert (
        last["eval/failures"] == last["eval/games"] == 8
        and "eval/success" not in last
        and "eval/success" in start
    )
    assert (tmp_path / "second" / "checkpoints" / "step_000001").is_dir()
    train(environment("False"), {"run.name": "second", "run.updates": 2}, "--resume", "auto")
    assert [line["step"] for line in read(tmp_path / "second")] == [0, 1, 2]
