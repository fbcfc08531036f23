"""Trackers, by their real packages: project, name and tags, and a resumed run that goes on as the same one."""

import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paw.config.plugins import load
from paw.config.recipe import load as load_recipe
from paw.config.sections import Config, ModelConfig
from paw.errors import UserError

TRACKING = {"project": "households", "name": "mine", "tags": ["toy", "cpu"]}
EXPECTED = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 14.0)]
"""Of the updates that are repeated, what was there first."""


def play(package, folder):
    """Three updates; then the run is resumed from its first checkpoint, with other numbers."""
    config = Config(model=ModelConfig(path="-"), run={"trackers": [package]}, tracking=TRACKING)
    for begun, updates in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        ranks = SimpleNamespace(first=True)
        stage = SimpleNamespace(
            config=config, step=begun, directory=Path(folder), ranks=ranks, failed=False
        )
        tracker = load("callbacks", package)()
        tracker.on_start(stage)
        for stage.step in updates:
            tracker.on_update(
                stage,
                {"reward/mean": stage.step + 10.0 * begun, "policy/kl": math.nan, "note": "text"},
            )
        tracker.on_end(stage)


def child(package, folder, **variables):
    """`play` in a process of its own: these keep threads, processes and settings."""
    words = [sys.executable, __file__, package, str(folder)]
    done = subprocess.run(
        words, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_mlflow_goes_on_with_its_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the optional tracker mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    play("mlflow", tmp_path / "run")
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "run" / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("households").experiment_id])
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.tags["toy"] == found.data.tags["cpu"] == "true"
    assert (
        found.data.params["tracking.project"] == "households"
        and found.data.params["optim.lr"] == "1e-06"
    )
    assert sorted(found.data.metrics) == ["reward/mean"]
    assert [
        (m.step, m.value) for m in client.get_metric_history(found.info.run_id, "reward/mean")
    ] == EXPECTED
    client.delete_run(found.info.run_id)
    play("mlflow", tmp_path / "run")  # which is no reason to fail
    assert len(client.search_runs([found.info.experiment_id])) == 1


def test_trackio_goes_on_with_its_run(tmp_path):
    pytest.importorskip("trackio", reason="the optional tracker trackio is not installed")
    child("trackio", tmp_path / "run", TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "households.db") as found:
        rows = found.execute("select run_name, step, metrics from metrics order by step").fetchall()
        runs = found.execute("select count(distinct run_id) from metrics").fetchone()
        (config,) = found.execute("select config from configs").fetchone()
    assert [(step, json.loads(metrics)["reward/mean"]) for _, step, metrics in rows] == EXPECTED
    assert {name for name, _, _ in rows} == {"mine"} and runs == (1,)
    assert json.loads(config)["tracking"]["tags"] == ["toy", "cpu"]


def test_wandb_goes_on_with_its_run(tmp_path):
    pytest.importorskip("wandb", reason="the optional tracker wandb is not installed")
    child("wandb", tmp_path / "run", WANDB_MODE="offline")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    records = [wandb_records(file) for file in files]
    (first, second) = (
        next(record.run for record in of if record.HasField("run")) for of in records
    )
    assert (first.project, first.display_name, list(first.tags)) == (
        "households",
        "mine",
        ["toy", "cpu"],
    )
    assert (
        first.run_id == second.run_id == (tmp_path / "run" / "wandb_id.txt").read_text().split()[0]
    )
    history = [record.history.item for of in records for record in of if record.HasField("history")]
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        for items in history
    ]
    assert [(row["_step"], row["reward/mean"]) for row in rows] == EXPECTED


def wandb_records(file):
    """Of an offline run: LevelDB's log format, blocks of 32 KiB, after a head of 7 bytes."""
    from wandb.proto import wandb_internal_pb2 as proto

    data, at, parts, found = file.read_bytes(), 7, [], []
    while at + 7 <= len(data):
        if 0x8000 - at % 0x8000 < 7:
            at += 0x8000 - at % 0x8000
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record = proto.Record()
            record.ParseFromString(b"".join(parts))
            found.append(record)
            parts = []
    return found


def test_tensorboard_has_the_names_in_its_text(tmp_path):
    pytest.importorskip("tensorboard", reason="the optional tracker tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]  # not what is no number
    (about,) = {event.tensor_proto.string_val[0] for event in events.Tensors("run/text_summary")}
    assert about == b"project: households\n\nname: mine\n\ntags: toy, cpu"
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("reward/mean")] == [
        (1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)
    ]  # fmt: skip
    assert not (tmp_path / "tensorboard_id.txt").exists()


def test_tracking_needs_a_tracker():
    with pytest.raises(UserError, match=r"unknown key 'tracking.project'; it needs run.trackers"):
        load_recipe("quickstart", {"tracking.project": "mine"})
    config = load_recipe("quickstart", {"run.trackers": "mlflow", "tracking.tags": "one"})
    assert (config.tracking.project, config.tracking.name, config.tracking.tags) == (
        "paw",
        None,
        ["one"],
    )


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    play(*sys.argv[1:])
