"""Evaluation where environments break: each failure is counted, shown and in the denominator; all of them end a run."""

import json
from pathlib import Path

import pytest

from paw.rollout.success import wilson

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_environment.py"
ONE_TURN_WINS = "won, more = guess == self.secret, guess < self.secret", "won, more = True, False"
MOST_FAIL = (
    "        self.secret, self.low",
    "        if not task.id.startswith('train') and int(task.id.rpartition('/')[2]) % 4:\n"
    "            raise RuntimeError('boom')\n"
    "        self.secret, self.low",
)
OWN_TASKS = (
    '    tasks = [Task(f"guess {n}", payload=n) for n in range(1, 100)]\n',
    '    def tasks(self, split, seed):\n        return [Task(f"{split}/{n}", "guess", n + 1) for n in range(8)]\n',
)
FAILED_AFTER_TRAINING = (  # called as a run is built, before training, and at its end
    '        return [Task(f"{split}',
    "        self.calls = getattr(self, 'calls', 0) + (split != 'train')\n"
    "        split += '-broken' * (self.calls == 3)\n"
    '        return [Task(f"{split}',
)
ALL_FAIL = (
    "        self.secret, self.low",
    "        assert 'broken' not in task.id, 'boom'\n        self.secret, self.low",
)


@pytest.fixture
def environment(tmp_path):
    """Writes docs/example_environment.py with the given replacements; returns its env.name."""

    def write(*changes):
        text = EXAMPLE.read_text(encoding="utf-8")
        for old, new in (OWN_TASKS, *changes):
            assert text.count(old) == 1
            text = text.replace(old, new)
        (tmp_path / "mine.py").write_text(text)
        return f"{tmp_path / 'mine.py'}:Guess"

    return write


@pytest.fixture
def settings(tiny_llm, tmp_path):
    return {
        "model.path": tiny_llm(tmp_path / "model"), "model.dtype": "float32", "run.dir": tmp_path, "run.name": "run",
        "run.updates": 1, "run.threads": 1, "env.max_turns": 1, "rollout.tasks": 2, "rollout.group_size": 2,
        "rollout.engine": "transformers", "rollout.max_response_tokens": 4, "eval.games": 8, "policy.kl_coef": 0,
    }  # fmt: skip


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "guess.toml"
    path.write_text('[model]\npath = "-"\n')
    return path


def read(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_failed_episodes_are_in_the_denominator_and_in_the_line(paw_here, environment, settings, recipe, tmp_path):
    name = environment(ONE_TURN_WINS, MOST_FAIL)
    done = paw_here("train", recipe, settings, {"env.name": name})
    found = read(tmp_path / "run")
    assert len(found) == 2
    low, high = wilson(2, 8)
    for line in found:
        counts = [line[f"eval/{key}"] for key in ("games", "failures", "success", "success_guess", "ci_low", "ci_high")]
        assert counts == [8, 6, 0.25, 0.25, low, high] and line["eval/failure"] == "RuntimeError: boom"
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
    done = paw_here("eval", tmp_path / "run", "--out", tmp_path / "agent", code=1)  # the way of agents
    assert "6 episodes could not be played (RuntimeError: boom)" in done.stderr


def test_an_evaluation_in_which_all_fail_ends_the_run_with_the_reason(
    paw_here, environment, settings, recipe, tmp_path
):
    name = environment(FAILED_AFTER_TRAINING, ALL_FAIL)
    done = paw_here("train", recipe, settings, {"env.name": name}, code=2)
    reason = "none of 8 games, 8 failed (AssertionError: boom)"
    assert f"paw: stopped at update 1: evaluation: {reason}; the checkpoint of update 1 is intact" in done.stderr
    start, last = read(tmp_path / "run")
    assert last["eval/failures"] == last["eval/games"] == 8 and "eval/success" not in last and "eval/success" in start
    assert (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()

    more = {"env.name": environment(), "run.updates": 2}
    done = paw_here("train", recipe, settings, more, "--resume", "auto")
    assert [line["step"] for line in read(tmp_path / "run")] == [0, 1, 2]


def test_nothing_is_trained_where_no_game_can_be_played(paw_here, environment, settings, recipe, tmp_path):
    name = environment((ALL_FAIL[0], ALL_FAIL[1].replace("'broken' not in task.id", "False")))
    done = paw_here("train", recipe, settings, {"env.name": name}, code=2)
    assert "stopped at update 0: evaluation: none of 8 games, 8 failed" in done.stderr
    assert [line["step"] for line in read(tmp_path / "run")] == [0]
    done = paw_here("eval", settings["model.path"], {"env.name": name, "eval.games": 3}, code=1)
    assert "success none of 3 games, 3 failed (AssertionError: boom)" in done.stdout
