"""metrics.jsonl, samples.jsonl and episodes.jsonl: what is written, truncated, added and
refused."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from paw.errors import UserError
from paw.rundir.log import MetricsLog, open_log

NAMES = ["episodes.jsonl", "metrics.jsonl", "samples.jsonl"]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fill(metrics_log: MetricsLog, steps: range) -> None:
    for step in steps:
        metrics_log.episodes(step, [{"task": "a", "won": True}, {"task": "b", "won": False}])
        metrics_log.log(
            step, {"reward/mean": step / 3, "success/all": 0.1 + 0.2, "eval/success": 0.3}
        )
        metrics_log.sample(step, {"prompt": f"game {step}", "turns": [{"logp": [-0.5, math.nan]}]})


def test_values_become_plain_json_and_reach_the_disk(tmp_path, monkeypatch):
    synced = []
    with open_log(tmp_path / "run") as metrics_log:
        scalars = {
            "c": np.float32(0.5),
            "d": torch.tensor(float("inf")),
            "e": torch.tensor(3),
            "f": np.float64("nan"),
        }
        metrics_log.log(1, {"a": math.nan, "b": -math.inf, **scalars, "g": 2})
        metrics_log.sample(1, {"text": "λ \ud800 \u2028 x", "nested": {"values": (1.0, math.inf)}})
        record = {"step": 1, "a": None, "b": None, "c": 0.5, "d": None, "e": 3, "f": None, "g": 2}
        # Values reach the disk before the log is closed.
        assert lines(tmp_path / "run" / "metrics.jsonl") == [record]
        assert metrics_log.history == [record]
        fsync = os.fsync
        files = Path("/proc/self/fd")
        monkeypatch.setattr(
            os, "fsync", lambda fd: synced.append((files / str(fd)).readlink().name) or fsync(fd)
        )
        metrics_log.sync()
    assert sorted(synced) == NAMES
    content = (tmp_path / "run" / "samples.jsonl").read_bytes()
    assert content.count(b"\n") == 1
    assert json.loads(content) == {
        "step": 1,
        "text": "λ \ud800 \u2028 x",
        "nested": {"values": [1.0, None]},
    }


@pytest.mark.parametrize("torn", [b"", b'{"step": 8, "rew', b"\xff\xfe\n"])
def test_a_resumed_run_ends_with_the_files_of_an_uninterrupted_one(tmp_path, torn):
    with open_log(tmp_path / "whole") as metrics_log:
        fill(metrics_log, range(1, 11))
    with open_log(tmp_path / "cut") as metrics_log:
        fill(metrics_log, range(1, 8))
    for name in NAMES:
        with (tmp_path / "cut" / name).open("ab") as file:
            file.write(torn)
    with open_log(tmp_path / "cut", resume_step=5) as metrics_log:
        assert [record["step"] for record in metrics_log.history] == [1, 2, 3, 4, 5]
        fill(metrics_log, range(6, 11))
    assert all(
        (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        for name in NAMES
    )
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == NAMES


def test_an_evaluation_that_a_stop_left_out_is_added_to_its_line(tmp_path):
    with open_log(tmp_path) as metrics_log:
        metrics_log.log(0, {"eval/success": 0.1})
        metrics_log.log(
            1,
            {
                "reward/mean": 0.5,
                "eval/failures": 8.0,
                "eval/failure": "OSError: the server is gone",
            },
        )
        metrics_log.sample(0, {"prompt": "a"})
        # The run was killed after it had written the episodes and before the line of an evaluation.
        metrics_log.sample(1, {"prompt": "b"})
    with open_log(tmp_path, resume_step=1) as metrics_log:
        assert metrics_log.evaluated(0)
        assert not metrics_log.evaluated(1)
        assert not metrics_log.evaluated(2)
        metrics_log.sample(1, {"prompt": "b"})
        metrics_log.log(1, {"eval/success": 0.2})
        assert metrics_log.evaluated(1)
        metrics_log.log(2, {"reward/mean": 0.6})
    expected = [
        {"step": 0, "eval/success": 0.1},
        {"step": 1, "reward/mean": 0.5, "eval/success": 0.2},
    ]
    assert lines(tmp_path / "metrics.jsonl") == [*expected, {"step": 2, "reward/mean": 0.6}]
    assert [sample["prompt"] for sample in lines(tmp_path / "samples.jsonl")] == ["a", "b"]


def test_a_new_run_does_not_write_over_another(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"--resume auto.*--run\.name"):
        open_log(tmp_path)
    assert metrics.read_text() == '{"step": 1}\n'
    with open_log(tmp_path, resume_step=-1) as metrics_log:
        assert metrics_log.history == []
    assert metrics.read_bytes() == b""
    with pytest.raises(UserError, match=r"metrics.jsonl/run: Not a directory"):
        open_log(metrics / "run")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    fails_in_one_line = pytest.raises(
        UserError, match=r"metrics\.jsonl: No space left on device: free some space"
    )
    # The log leaves no buffered data that would fail again when it is closed.
    with open_log(tmp_path) as metrics_log, fails_in_one_line:
        metrics_log.log(1, {"reward/mean": 0.5})
