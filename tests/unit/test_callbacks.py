"""The callbacks that come with every run: the view of its progress, and the trackers."""

import io
import math
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from paw.config import Config, ModelConfig
from paw.errors import UserError
from paw.plugins import load
from paw.tools.live import LiveView
from paw.tools.trackers import TensorBoard

METRICS = {
    "reward/mean": 3.2,
    "success/all": 0.32,
    "success/pick": 0.5,
    "success/two": 0.05,
    "wm/lambda": 0.68,
    "time/rollout": 8.2,
    "time/update": 3.3,
    "perf/tokens_per_s": 2310.4,
    "perf/peak_gib": 21.3,
    "policy/kl": math.nan,
    "policy/entropy": None,
}


class Stage:
    """A run as far as a callback sees it, and the terminal it writes to."""

    def __init__(self, *, updates=20, step=0, first=True, terminal=True, width=100, encoding="utf-8", directory=None):
        self._raw = io.BytesIO()
        file = io.TextIOWrapper(self._raw, encoding=encoding, write_through=True)
        size = {"width": width, "height": 40} if terminal else {}
        self.console = Console(file=file, force_terminal=terminal, color_system=None, _environ={}, **size)
        self.config = Config(model=ModelConfig(path="-"), run={"updates": updates})
        self.step, self.directory, self.progress, self.ranks = step, directory, "", SimpleNamespace(first=first)
        self.signal = SimpleNamespace(requested=False, name="SIGINT")

    def show(self, *callbacks, updates=()):
        for callback in callbacks:
            callback.on_start(self)
            try:
                for self.step, metrics in updates:
                    callback.on_update(self, metrics)
            finally:
                callback.on_end(self)
        return self.text

    @property
    def text(self) -> str:
        return self._raw.getvalue().decode(self.console.encoding)


def test_without_a_terminal_an_update_is_one_line():
    run = Stage(updates=150, terminal=False)
    evaluation = {"eval/success": 0.41, "eval/games": 100.0, "eval/failures": 0.0, "health/env_failures": 2}
    first, second = run.show(LiveView(run.console), updates=[(1, METRICS), (2, evaluation)]).splitlines()
    assert first.startswith("step   1/150  reward 3.2  success 32.0%  lambda 0.680  ")
    assert "2,310 tok/s" in first and "21.3 GiB" in first and "kl" not in first and "\x1b" not in first
    assert second.startswith("step   2/150  eval 41.0% of 100 games  ") and "environment failures 2" in second


def test_the_live_view_shows_what_it_must():
    run = Stage()
    run.progress = "episodes 3/16"
    found = {"success": 0.41, "success_pick": 0.6, "games": 100.0, "failures": 1.0, "failure": "OSError: gone"}
    evaluation = {**{f"eval/{name}": value for name, value in found.items()}, "success/all": 0.1}
    shown = run.show(LiveView(run.console), updates=[(4, evaluation), (5, {**METRICS, "health/env_failures": 2})])
    frame = shown.rsplit("update 5/20", 1)[1]
    for piece in (
        *("left", "3.2", "32.0%", "pick 50%", "two 5%", "▁", "λ 0.680", "rollout 8.2 s", "update 3.3 s"),
        *("2,310 tokens/s", "peak 21.3 GiB", "environment failures 2", "episodes 3/16"),
        "41.0% of 100 games, 1 failed (OSError: gone)  pick 60.0%  at update 4",
    ):
        assert piece in frame, piece
    assert "nan" not in frame and "None" not in frame
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("width", [30, 60, 200])
def test_the_live_view_fits_the_terminal(width):
    run = Stage(updates=150, width=width)
    view = LiveView(run.console)
    run.show(view, updates=[(1, {**METRICS, **{f"success/kind_{i}": 0.5 for i in range(12)}}), (2, METRICS)])
    with run.console.capture() as capture:
        run.console.print(view._frame())
    assert max(len(line) for line in capture.get().splitlines()) <= width


def test_a_run_that_was_told_to_stop_shows_it():
    run = Stage()
    assert "stopping" not in run.show(LiveView(run.console), updates=[(1, METRICS)])
    run.signal.requested = True
    assert "finishing this update, then saving (again: stop now)" in run.show(
        LiveView(run.console), updates=[(2, METRICS)]
    )


def test_a_terminal_without_unicode_is_not_sent_any():
    run = Stage(encoding="ascii")
    assert "lambda 0.680" in run.show(LiveView(run.console), updates=[(1, METRICS), (2, METRICS)])


def test_other_ranks_show_nothing():
    run = Stage(first=False)
    assert run.show(LiveView(run.console), updates=[(1, METRICS)]) == ""


def test_time_left_counts_updates_of_this_session_only(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("paw.tools.live.time.monotonic", lambda: now[0])
    run = Stage(updates=100, step=50, terminal=False)
    view = LiveView(run.console)
    view.on_start(run)
    now[0] += 600.0
    view.on_update(run, {"eval/success": 0.4})  # what a stop left out, of the update before
    now[0] += 30.0
    run.step = 51
    view.on_update(run, {})
    assert run.text.splitlines()[-1] == "step  51/100  30.0 s  left 0:24:30"


def test_a_tracker_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="pip install wandb"):
        load("callbacks", "wandb")()


def test_tensorboard_shows_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard", reason="optional tracker tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = [(step, {"reward/mean": float(step), "policy/kl": math.nan}) for step in (1, 2, 3)]
    Stage(directory=tmp_path).show(TensorBoard(), updates=lines)
    Stage(directory=tmp_path, step=2).show(TensorBoard(), updates=[(3, {"reward/mean": 9.0})])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("reward/mean")] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    assert events.Tags()["scalars"] == ["reward/mean"]
