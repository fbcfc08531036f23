"""Trackers with their real packages: project, name and tags. A resumed run continues as the same
run."""

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
"""(step, reward) as logged. A repeated update keeps the value that was logged first."""


def play(package, folder):
    """Log three updates, then resume from the first checkpoint with other numbers."""
    config = Config(model=ModelConfig(path="-"), run={"trackers": [package]}, tracking=TRACKING)
    for first_step, updates in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        ranks = SimpleNamespace(first=True)
        stage = SimpleNamespace(
            config=config, step=first_step, directory=Path(folder), ranks=ranks, failed=False
        )
        tracker = load("callbacks", package)()
        tracker.on_start(stage)
        for stage.step in updates:
            tracker.on_update(
                stage,
                {
                    "reward/mean": stage.step + 10.0 * first_step,
                    "policy/kl": math.nan,
                    "note": "text",
                },
            )
        tracker.on_end(stage)


def child(package, folder, **variables):
    """Run `play` in its own process, because these packages keep threads, processes and
    settings."""
    command = [sys.executable, __file__, package, str(folder)]
    result = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_mlflow_goes_on_with_its_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the optional tracker mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    play("mlflow", tmp_path / "run")
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "run" / "mlruns").as_uri())
    (mlflow_run,) = client.search_runs([client.get_experiment_by_name("households").experiment_id])
    assert mlflow_run.info.run_name == "mine"
    assert mlflow_run.info.status == "FINISHED"
    assert mlflow_run.data.tags["toy"] == "true"
    assert mlflow_run.data.tags["cpu"] == "true"
    assert mlflow_run.data.params["tracking.project"] == "households"
    assert mlflow_run.data.params["optim.lr"] == "1e-06"
    assert sorted(mlflow_run.data.metrics) == ["reward/mean"]
    assert [
        (measurement.step, measurement.value)
        for measurement in client.get_metric_history(mlflow_run.info.run_id, "reward/mean")
    ] == EXPECTED
    client.delete_run(mlflow_run.info.run_id)
    play("mlflow", tmp_path / "run")  # a run that was deleted is no reason to fail
    assert len(client.search_runs([mlflow_run.info.experiment_id])) == 1


@pytest.mark.slow
def test_trackio_goes_on_with_its_run(tmp_path):
    pytest.importorskip("trackio", reason="the optional tracker trackio is not installed")
    child("trackio", tmp_path / "run", TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "households.db") as database:
        rows = database.execute(
            "select run_name, step, metrics from metrics order by step"
        ).fetchall()
        run_count = database.execute("select count(distinct run_id) from metrics").fetchone()
        (config,) = database.execute("select config from configs").fetchone()
    assert [(step, json.loads(metrics)["reward/mean"]) for _, step, metrics in rows] == EXPECTED
    assert {name for name, _, _ in rows} == {"mine"}
    assert run_count == (1,)
    assert json.loads(config)["tracking"]["tags"] == ["toy", "cpu"]


@pytest.mark.slow
def test_wandb_goes_on_with_its_run(tmp_path):
    pytest.importorskip("wandb", reason="the optional tracker wandb is not installed")
    child("wandb", tmp_path / "run", WANDB_MODE="offline")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    records = [wandb_records(file) for file in files]
    (first, second) = (
        next(record.run for record in of_file if record.HasField("run")) for of_file in records
    )
    assert first.project == "households"
    assert first.display_name == "mine"
    assert list(first.tags) == ["toy", "cpu"]
    assert (
        first.run_id == second.run_id == (tmp_path / "run" / "wandb_id.txt").read_text().split()[0]
    )
    history = [
        record.history.item
        for of_file in records
        for record in of_file
        if record.HasField("history")
    ]
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        for items in history
    ]
    assert [(row["_step"], row["reward/mean"]) for row in rows] == EXPECTED


def wandb_records(file):
    """The records of an offline run. LevelDB's log format: blocks of 32 KiB after a header of 7
    bytes."""
    from wandb.proto import wandb_internal_pb2 as proto

    content = file.read_bytes()
    offset = 7
    fragments = []
    records = []
    while offset + 7 <= len(content):
        if 0x8000 - offset % 0x8000 < 7:
            offset += 0x8000 - offset % 0x8000
            continue
        length, fragment_kind = struct.unpack("<HB", content[offset + 4 : offset + 7])
        fragments.append(content[offset + 7 : offset + 7 + length])
        offset += 7 + length
        if fragment_kind in (1, 4):  # a complete record, or the last part of one
            record = proto.Record()
            record.ParseFromString(b"".join(fragments))
            records.append(record)
            fragments = []
    return records


def test_tensorboard_has_the_names_in_its_text(tmp_path):
    pytest.importorskip("tensorboard", reason="the optional tracker tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]  # values that are not numbers are left out
    (description,) = {
        event.tensor_proto.string_val[0] for event in events.Tensors("run/text_summary")
    }
    assert description == b"project: households\n\nname: mine\n\ntags: toy, cpu"
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("reward/mean")] == [
        (1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)
    ]  # fmt: skip
    assert not (tmp_path / "tensorboard_id.txt").exists()


def test_tracking_needs_a_tracker():
    with pytest.raises(UserError, match=r"unknown key 'tracking.project'; it needs run.trackers"):
        load_recipe("quickstart", {"tracking.project": "mine"})
    config = load_recipe("quickstart", {"run.trackers": "mlflow", "tracking.tags": "one"})
    assert config.tracking.project == "paw"
    assert config.tracking.name is None
    assert config.tracking.tags == ["one"]


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    play(*sys.argv[1:])
