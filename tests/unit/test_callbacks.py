"""The callbacks that come with every run: the view of its progress, samples, the report, and the trackers."""

import io
import json
import math
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from toyworld import make_chat, make_engine, make_factory, practised_model

from paw.config import Config, ModelConfig, RolloutConfig
from paw.envs.base import eval_tasks
from paw.errors import ESCAPE, UserError
from paw.model.policy import Policy
from paw.plugins import load
from paw.rollout.scheduler import Rollouts
from paw.tools.callbacks import Progress, Report, sample_episode
from paw.tools.live import LiveView
from paw.tools.trackers import TensorBoard
from paw.types import Outcome, Trajectory, Turn

METRICS = {
    "reward/mean": 3.2, "success/all": 0.32, "success/pick": 0.5, "success/two": 0.05, "wm/lambda": 0.68,
    "time/rollout": 8.2, "time/update": 3.3, "perf/tokens_per_s": 2310.4, "perf/peak_gib": 21.3,
}  # fmt: skip


class Stage:
    """A run as far as a callback sees it."""

    def __init__(self, *, updates=20, step=0, first=True, directory=None):
        self.config = Config(model=ModelConfig(path="-"), run={"updates": updates})
        self.step, self.directory, self.progress, self.ranks = step, directory, "", SimpleNamespace(first=first)
        self.signal, self.failed = SimpleNamespace(requested=False, name="SIGINT"), False
        self.said: list[str] = []
        self.say = self.said.append

    def show(self, callback, *updates):
        callback.on_start(self)
        for self.step, metrics in updates:
            callback.on_update(self, metrics)
        callback.on_end(self)
        return self.said


def on_terminal(*updates, width=100, encoding="utf-8", stop=False):
    """What a terminal is sent."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    console = Console(file=file, force_terminal=True, color_system=None, _environ={}, width=width, height=40)
    run = Stage()
    run.progress, run.signal.requested = "episodes 3/16", stop
    view = LiveView(run, console)
    for run.step, metrics in updates:
        view.update(metrics)
    view.stop()
    return raw.getvalue().decode(encoding)


def test_without_a_terminal_an_update_is_one_line_of_the_first_rank():
    evaluation = {"eval/success": 0.41, "eval/games": 100.0, "eval/failures": 0.0, "health/env_failures": 2}
    updates = [(1, METRICS | {"policy/kl": math.nan, "policy/entropy": None}), (2, evaluation)]
    first, second = Stage(updates=150).show(Progress(), *updates)
    assert first.startswith("step   1/150  reward 3.2  success 32.0%  lambda 0.680  ")
    assert "2,310 tok/s" in first and "21.3 GiB" in first and "kl" not in first and "entropy" not in first
    assert second.startswith("step   2/150  eval 41.0% of 100 games  ") and "environment failures 2" in second
    assert Stage(first=False).show(Progress(), *updates) == []


def test_the_live_view_shows_what_it_must():
    evaluation = {"eval": "41.0% of 100 games, 1 failed (OSError: gone)", "eval/success_pick": 0.6, "success/all": 0.1}
    updates = [(4, evaluation), (5, {**METRICS, "health/env_failures": 2, "left": "0:01:00"})]
    shown = on_terminal(*updates)
    frame = shown.rsplit("update 5/20", 1)[1]
    for piece in (
        *("0:01:00 left", "3.2", "32.0%", "pick 50%", "two 5%", "▁", "λ 0.680", "rollout 8.2 s", "update 3.3 s"),
        *("2,310 tokens/s", "peak 21.3 GiB", "environment failures 2", "episodes 3/16"),
        "41.0% of 100 games, 1 failed (OSError: gone)  pick 60.0%  at update 4",
    ):
        assert piece in frame, piece
    assert "stopping" not in frame and shown.rstrip().endswith("\x1b[?25h")  # the cursor is back
    assert "finishing this update, then saving (again: stop now)" in on_terminal(*updates, stop=True)
    assert "lambda 0.680" in on_terminal(*updates, encoding="ascii")
    for encoding in ("ascii", "utf-8"):
        narrow = on_terminal(*updates, width=30, encoding=encoding)
        assert max(map(len, ESCAPE.sub("", narrow).splitlines())) <= 30


def test_time_left_counts_updates_of_this_session_only(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("paw.tools.callbacks.time.monotonic", lambda: now[0])
    run, view = Stage(updates=100, step=50), Progress()
    view.on_start(run)
    now[0] += 600.0
    view.on_update(run, {"eval/success": 0.4})  # what a stop left out, of the update before
    now[0] += 30.0
    run.step = 51
    view.on_update(run, {})
    assert run.said[-1] == "step  51/100  30.0 s  left 0:24:30"


def test_samples_show_what_was_seen_and_expected():
    model, factory, chat = practised_model(), make_factory(), make_chat()
    limits = RolloutConfig(max_prompt_tokens=256, max_response_tokens=3)
    config = Config(model=ModelConfig(path="-"), rollout=limits, wm={"max_tokens": 16})
    run = SimpleNamespace(config=config, policy=Policy(model), engine=make_engine(model), chat=chat)
    rollouts, tasks = Rollouts(factory, run.engine, chat, config), eval_tasks(factory, "valid_unseen", 1, 0)
    (group,), _ = rollouts.play(tasks, group_size=1, temperature=0.4, seed=0, stream="eval")
    (episode,) = group.trajectories
    sample = sample_episode(run, episode)
    assert json.loads(json.dumps(sample)) == sample
    assert sample["task"] == episode.task.id and sample["length"] == len(episode.turns) == len(sample["turns"])
    for shown, turn in zip(sample["turns"], episode.turns, strict=True):
        assert (shown["prompt"], shown["observation"]) == (turn.prompt, turn.outcome.observation)
        assert turn.outcome.observation.startswith("".join(shown["observation_tokens"]))
        assert len(shown["observation_tokens"]) == len(shown["observation_token_p"]) <= 16
        assert all(0 <= p <= 1 for p in shown["observation_token_p"])
        assert shown["entropy"] == pytest.approx(sum(turn.entropy) / len(turn.entropy))
        if shown["observation_token_p"][0] > 0.5:  # the greedy prediction is the most likely token
            assert shown["predicted"].startswith(shown["observation_tokens"][0])

    turn = episode.turns[0]  # what cannot be predicted is left out
    long = Turn(**{**vars(turn), "prompt_ids": turn.prompt_ids * 100})
    silent = Turn(**{**vars(turn), "outcome": Outcome("", 0.0, True, False, "look", True), "entropy": None})
    assert len(long.prompt_ids) > model.config.max_position_embeddings
    beyond, empty = sample_episode(run, Trajectory(episode.task, 0, [long, silent]))["turns"]
    assert beyond["predicted"] is None and len(beyond["observation_token_p"]) > 0 and run.engine.pending == 0
    assert [empty[key] for key in ("predicted", "entropy", "observation_token_p")] == [None, None, []]


def test_a_report_that_fails_is_a_warning(tmp_path):
    run = Stage(directory=tmp_path)
    Report().on_end(run)
    (line,) = run.said
    assert line.startswith(f"warning: no report was written: {tmp_path}: no metrics.jsonl in it; ")


def test_a_tracker_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="pip install wandb"):
        load("callbacks", "wandb")()


def test_tensorboard_shows_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard", reason="optional tracker tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Stage(directory=tmp_path).show(TensorBoard(), *((n, {"reward/mean": n, "policy/kl": math.nan}) for n in (1, 2, 3)))
    Stage(directory=tmp_path, step=2).show(TensorBoard(), (3, {"reward/mean": 9.0}))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("reward/mean")] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    assert events.Tags()["scalars"] == ["reward/mean"]
