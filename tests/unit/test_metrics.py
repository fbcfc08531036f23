"""metrics.jsonl and samples.jsonl, the trackers, and the view of progress."""

import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from paw.errors import UserError
from paw.state.log import MetricsLog, check_trackers
from paw.tools.live import LiveView


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fill(log: MetricsLog, steps: range) -> None:
    for step in steps:
        log.log(step, {"reward/mean": step / 3, "success/all": 0.1 + 0.2, "eval/success": 0.3})
        log.sample(step, {"prompt": f"game {step}", "turns": [{"logp": [-0.5, math.nan]}]})


def test_a_line_is_on_disk_once_logged(tmp_path):
    log = MetricsLog(tmp_path / "run")
    log.log(1, {"reward/mean": 0.5})
    assert lines(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}]
    log.close()


def test_values_become_plain_json(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.log(
            1,
            {
                "a": math.nan,
                "b": -math.inf,
                "c": np.float32(0.5),
                "d": torch.tensor(float("inf")),
                "e": torch.tensor(3),
                "f": np.float64("nan"),
                "g": 2,
            },
        )
        log.sample(1, {"text": "λ \ud800 \u2028 x", "nested": {"values": (1.0, math.inf)}})
    record = {"step": 1, "a": None, "b": None, "c": 0.5, "d": None, "e": 3, "f": None, "g": 2}
    assert lines(tmp_path / "metrics.jsonl") == [record] == log.history
    raw = (tmp_path / "samples.jsonl").read_bytes()
    assert raw.count(b"\n") == 1
    assert json.loads(raw) == {"step": 1, "text": "λ \ud800 \u2028 x", "nested": {"values": [1.0, None]}}


@pytest.mark.parametrize("torn", [b"", b'{"step": 8, "rew', b'{"step": 5}', b"\xff\xfe\n"])
def test_a_resumed_run_ends_with_the_files_of_an_uninterrupted_one(tmp_path, torn):
    with MetricsLog(tmp_path / "whole") as log:
        fill(log, range(1, 11))
    with MetricsLog(tmp_path / "cut") as log:
        fill(log, range(1, 8))
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / "cut" / name).open("ab") as file:
            file.write(torn)
    with MetricsLog(tmp_path / "cut", resume_step=5) as log:
        assert [record["step"] for record in log.history] == [1, 2, 3, 4, 5]
        fill(log, range(6, 11))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["metrics.jsonl", "samples.jsonl"]


def test_an_evaluation_that_a_stop_left_out_is_added_to_its_line(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.log(0, {"eval/success": 0.1})
        log.log(1, {"reward/mean": 0.5, "eval/failures": 8.0, "eval/failure": "OSError: the server is gone"})
        log.sample(0, {"prompt": "a"})
        log.sample(1, {"prompt": "b"})  # a kill came between the episodes and the line of an evaluation
    with MetricsLog(tmp_path, resume_step=1) as log:
        assert (log.evaluated(0), log.evaluated(1), log.evaluated(2)) == (True, False, False)
        log.sample(1, {"prompt": "b"})
        log.log(1, {"eval/success": 0.2})
        assert log.evaluated(1)
        log.log(2, {"reward/mean": 0.6})
    expected = [{"step": 0, "eval/success": 0.1}, {"step": 1, "reward/mean": 0.5, "eval/success": 0.2}]
    assert lines(tmp_path / "metrics.jsonl") == [*expected, {"step": 2, "reward/mean": 0.6}]
    assert [sample["prompt"] for sample in lines(tmp_path / "samples.jsonl")] == ["a", "b"]


def test_a_new_run_does_not_write_over_another(tmp_path):
    with MetricsLog(tmp_path) as log:
        fill(log, range(1, 3))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"--resume auto.*--run\.name"):
        MetricsLog(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    with MetricsLog(tmp_path, resume_step=-1) as log:
        assert log.history == []
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_run_dir_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/run: Not a directory"):
        MetricsLog(tmp_path / "file" / "run")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = MetricsLog(tmp_path)
    with pytest.raises(UserError, match=r"metrics\.jsonl: No space left on device"):
        log.log(1, {"reward/mean": 0.5})


def test_a_missing_tracker_is_named_with_its_install_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="pip install wandb"):
        MetricsLog(tmp_path / "run", trackers=["wandb"])
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="unknown tracker 'mlflow'"):
        check_trackers(["mlflow"])


def test_tensorboard_shows_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard", reason="optional tracker tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path, trackers=["tensorboard"], config={"seed": 1}) as log:
        for step in (1, 2, 3):
            log.log(step, {"reward/mean": float(step), "policy/kl": math.nan})
    with MetricsLog(tmp_path, trackers=["tensorboard"], resume_step=2) as log:
        log.log(3, {"reward/mean": 9.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("reward/mean")] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    assert events.Tags()["scalars"] == ["reward/mean"]


# --- the view ------------------------------------------------------------------------------------------------------

METRICS = {
    "reward/mean": 3.2,
    "success/all": 0.32,
    "success/pick": 0.5,
    "success/two": 0.05,
    "world/lambda": 0.68,
    "time/rollout": 8.2,
    "time/update": 3.3,
    "perf/tokens_per_s": 2310.4,
    "perf/peak_gib": 21.3,
    "policy/kl": math.nan,
    "policy/entropy": None,
}


def terminal(width: int = 100, encoding: str = "utf-8") -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    return Console(file=file, force_terminal=True, width=width, height=40, color_system=None, _environ={}), raw


def test_plain_is_one_line_an_update():
    out = io.StringIO()
    with LiveView(150, console=Console(file=out)) as view:
        assert view.mode == "plain"
        view.header(["recipe [x]", "run dir"])
        view.update(1, METRICS)
        view.message("saved [bold]")
        view.update(2, {"eval/success": 0.41, "eval/games": 100.0, "eval/failures": 0.0, "health/env_failures": 2})
    text = out.getvalue().splitlines()
    assert text[0] == "recipe [x]" and text[1] == "run dir" and text[3] == "saved [bold]" and len(text) == 5
    assert text[2].startswith("step   1/150  reward 3.2  success 32.0%  lambda 0.680  ")
    assert "2,310 tok/s" in text[2] and "21.3 GiB" in text[2] and "kl" not in text[2] and "\x1b" not in out.getvalue()
    assert text[4].startswith("step   2/150  eval 41.0% of 100 games  ") and "environment failures 2" in text[4]


def test_the_live_view_shows_what_it_must():
    console, raw = terminal()
    with LiveView(20, console=console) as view:
        assert view.mode == "live"
        view.header(["recipe [x]"])
        evaluation = {"success": 0.41, "success_pick": 0.6, "games": 100.0, "failures": 1.0, "failure": "OSError: gone"}
        view.update(4, {**{f"eval/{name}": value for name, value in evaluation.items()}, "success/all": 0.1})
        view.message("saved [bold]")
        view.update(5, {**METRICS, "health/env_failures": 2})
    shown = raw.getvalue().decode()
    assert "recipe [x]" in shown and "saved [bold]" in shown
    frame = shown.rsplit("update 5/20", 1)[1]
    for piece in (
        *("left", "3.2", "32.0%", "pick 50%", "two 5%", "▁", "λ 0.680", "rollout 8.2 s", "update 3.3 s"),
        *(
            "2,310 tokens/s",
            "peak 21.3 GiB",
            "environment failures 2",
            "41.0% of 100 games, 1 failed (OSError: gone)  pick 60.0%  at update 4",
        ),
    ):
        assert piece in frame, piece
    assert "nan" not in frame and "None" not in frame


@pytest.mark.parametrize("width", [30, 60, 200])
def test_the_live_view_fits_the_terminal(width):
    console, _ = terminal(width)
    view = LiveView(150, console=console)
    view.update(1, {**METRICS, **{f"success/kind_{i}": 0.5 for i in range(12)}})
    view.update(2, METRICS)
    with console.capture() as capture:
        console.print(view._frame())
    assert max(len(line) for line in capture.get().splitlines()) <= width


def test_a_terminal_without_unicode_is_not_sent_any():
    console, raw = terminal(encoding="ascii")
    with LiveView(20, console=console) as view:
        view.update(1, METRICS)
        view.update(2, METRICS)
    assert "lambda 0.680" in raw.getvalue().decode("ascii")


def test_off_prints_nothing():
    out = io.StringIO()
    with LiveView(5, mode="off", console=Console(file=out)) as view:
        view.header(["x"])
        view.update(1, METRICS)
        view.message("y")
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    "begin", [lambda view: view.header(["x"]), lambda view: view.update(50, {"eval/success": 0.4})]
)
def test_time_left_counts_updates_of_this_session_only(monkeypatch, begin):
    now = [1000.0]
    monkeypatch.setattr("paw.tools.live.time.monotonic", lambda: now[0])
    out = io.StringIO()
    with LiveView(100, start=50, console=Console(file=out)) as view:
        now[0] += 600.0  # loading the model, warming it up
        begin(view)
        now[0] += 30.0
        view.update(51, {})
    assert out.getvalue().splitlines()[-1] == "step  51/100  30.0 s  left 0:24:30"


def test_the_cursor_returns_after_an_error():
    console, raw = terminal()
    with pytest.raises(RuntimeError), LiveView(5, console=console):
        raise RuntimeError
    assert raw.getvalue().decode().rstrip().endswith("\x1b[?25h")
