"""The callbacks of every run: progress, samples, the report and the trackers."""

import io
import json
import math
import sys
from types import SimpleNamespace

import pytest
from toyworld import make_chat, make_engine, make_factory, practised_model

from paw.config.plugins import give, load
from paw.config.sections import Config, ModelConfig, RolloutConfig
from paw.envs.base import eval_tasks
from paw.errors import UserError, progress
from paw.hooks import make_callbacks
from paw.model.policy import Policy
from paw.rollouts.scheduler import Rollouts
from paw.tools.train.callbacks import Progress, Report, sample_episode
from paw.types import Outcome, Trajectory, Turn

METRICS = {
    "reward/mean": 3.2, "success/all": 0.32, "success/pick": 0.5, "success/two": 0.05, "wm/lambda": 0.68,
    "time/rollout": 8.2, "time/update": 3.3, "perf/tokens_per_s": 2310.4, "perf/peak_gib": 21.3,
}  # fmt: skip


class Stage:
    """The parts of a run that a callback uses."""

    def __init__(self, *, updates=20, step=0, is_first_rank=True, directory=None):
        self.config = Config(model=ModelConfig(path="-"), run={"updates": updates})
        self.step = step
        self.directory = directory
        self.ranks = SimpleNamespace(first=is_first_rank)
        self.signal = SimpleNamespace(requested=False, name="SIGINT")
        self.failed = False
        self.said: list[str] = []
        self.say = self.said.append

    def show(self, callback, *updates):
        callback.on_start(self)
        for self.step, metrics in updates:
            callback.on_update(self, metrics)
        return self.said


def test_an_update_is_one_line_of_the_first_rank():
    evaluation = {
        "eval/success": 0.41,
        "eval/games": 100.0,
        "eval/failures": 0.0,
        "health/env_failures": 2,
    }
    updates = [(1, METRICS | {"policy/kl": math.nan, "policy/entropy": None}), (2, evaluation)]
    first_line, second_line = Stage(updates=150).show(Progress(), *updates)
    assert first_line.startswith("update   1/150  reward 3.2  success 32.0%  lambda 0.680  ")
    assert "2,310 tok/s" in first_line
    assert "21.3 GiB" in first_line
    assert "kl" not in first_line
    assert "entropy" not in first_line
    assert second_line.startswith("update   2/150  eval 41.0% of 100 games  ")
    assert "environment failures 2" in second_line
    assert Stage(is_first_rank=False).show(Progress(), *updates) == []


def test_a_terminal_shows_in_place_how_far_it_is(monkeypatch):
    for is_terminal, expected in (
        (True, "\repisodes 1/2\repisodes 2/2\r            \r"),
        (False, ""),
    ):
        stream = io.StringIO()
        stream.isatty = lambda is_terminal=is_terminal: is_terminal
        monkeypatch.setattr(sys, "stderr", stream)
        for updates_done in (1, 2):
            progress("episodes", updates_done, 2)
        assert stream.getvalue() == expected


def test_time_left_counts_updates_of_this_session_only(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("paw.tools.train.callbacks.time.monotonic", lambda: clock[0])
    stage = Stage(updates=100, step=50)
    view = Progress()
    view.on_start(stage)
    clock[0] += 600.0
    view.on_update(stage, {"eval/success": 0.4})  # of update 50, which a stop left out
    clock[0] += 30.0
    stage.step = 51
    view.on_update(stage, {})
    assert stage.said[-1] == "update  51/100  30.0 s  left 0:24:30"


def test_samples_show_what_was_seen_and_expected():
    model = practised_model()
    factory = make_factory()
    chat = make_chat()
    limits = RolloutConfig(max_prompt_tokens=256, max_response_tokens=3)
    config = Config(model=ModelConfig(path="-"), rollout=limits, wm={"max_tokens": 16})
    run = SimpleNamespace(config=config, policy=Policy(model), engine=make_engine(model), chat=chat)
    rollouts = Rollouts(factory, run.engine, chat, config)
    tasks = eval_tasks(factory, "valid_unseen", 1, 0)
    (group,), _ = rollouts.play_tasks(tasks, group_size=1, temperature=0.4, seed=0, stream="eval")
    (episode,) = group.trajectories
    sample = sample_episode(run, episode)
    assert json.loads(json.dumps(sample)) == sample
    assert sample["task"] == episode.task.id
    assert sample["length"] == len(episode.turns)
    assert len(sample["turns"]) == len(episode.turns)
    for shown_turn, turn in zip(sample["turns"], episode.turns, strict=True):
        assert shown_turn["prompt"] == turn.prompt
        assert shown_turn["observation"] == turn.outcome.observation
        assert turn.outcome.observation.startswith("".join(shown_turn["observation_tokens"]))
        assert len(shown_turn["observation_tokens"]) == len(shown_turn["observation_token_p"]) <= 16
        assert all(0 <= p <= 1 for p in shown_turn["observation_token_p"])
        assert shown_turn["entropy"] == pytest.approx(sum(turn.entropy) / len(turn.entropy))
        # The greedy prediction is the most likely token.
        if shown_turn["observation_token_p"][0] > 0.5:
            assert shown_turn["predicted"].startswith(shown_turn["observation_tokens"][0])

    turn = episode.turns[0]  # what cannot be predicted is left out
    too_long = Turn(**{**vars(turn), "prompt_ids": turn.prompt_ids.tolist() * 100})
    silent = Turn(
        **{**vars(turn), "outcome": Outcome("", 0.0, True, False, "look", True), "entropy": None}
    )
    assert len(too_long.prompt_ids) > model.config.max_position_embeddings
    beyond, empty = sample_episode(run, Trajectory(episode.task, 0, [too_long, silent]))["turns"]
    assert beyond["predicted"] is None
    assert len(beyond["observation_token_p"]) > 0
    assert run.engine.pending == 0
    assert [empty[key] for key in ("predicted", "entropy", "observation_token_p")] == [
        None,
        None,
        [],
    ]


@pytest.mark.slow
def test_a_report_that_fails_is_a_warning(tmp_path):
    stage = Stage(directory=tmp_path)
    Report().on_end(stage)
    (line,) = stage.said
    assert line.startswith(f"warning: no report was written: {tmp_path}: no metrics.jsonl in it; ")


def test_a_tracker_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="pip install wandb"):
        load("callbacks", "wandb")()


def test_a_callback_without_a_hook_is_named():
    class Late:
        def on_updates(self, run, metrics):
            pass

    for callback, hint in (
        (Late, "did you mean 'on_update'?"),
        (Late(), "on_update"),
        ([], "on_start, "),
    ):
        with pytest.raises(UserError, match=r"run\.callbacks: .* has no hook: ") as raised:
            make_callbacks([give(callback)])
        assert hint in str(raised.value)
