"""A run that is killed or stopped goes on bit for bit; one that meets non-finite numbers stops unharmed."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paw import train
from paw.state import checkpoint

pytestmark = pytest.mark.slow
UPDATES = 6


@pytest.fixture(scope="module")
def arguments(quick, quick_run):
    """Of every run here; `quick_run` has made the model."""
    return quick | {"run.updates": UPDATES, "run.save_every": 2, "run.keep": 9, "rollout.tasks": 8, "eval.every": 5}


@pytest.fixture(scope="module")
def whole(paw, arguments, tmp_path_factory):
    """The run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    paw("train", "quickstart", arguments, {"run.dir": folder, "run.name": "run"})
    return folder / "run"


def wait_for(condition, child):
    deadline = time.monotonic() + 120
    while not condition():
        assert child.poll() is None, f"ended too early, exit {child.returncode}: {child.stderr.read()}"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def logged(run: Path) -> int:
    """Lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


def assert_same(run: Path, whole: Path, read_metrics) -> None:
    last = f"step_{UPDATES:06d}"
    ours, theirs = (checkpoint.read_manifest(folder / "checkpoints" / last) for folder in (run, whole))
    assert ours[0] == theirs[0]
    assert (run / "hf" / "model.safetensors").read_bytes() == (whole / "hf" / "model.safetensors").read_bytes()
    assert read_metrics(run) == read_metrics(whole)
    assert (run / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()


def test_killed_between_checkpoints(paw_here, paw_start, arguments, whole, read_metrics, tmp_path):
    run = tmp_path / "run"
    arguments = arguments | {"run.dir": tmp_path, "run.name": "run"}
    child = paw_start("train", "quickstart", arguments)
    wait_for(lambda: logged(run) > 3, child)  # updates 0 to 3 are written: the next one is at work
    child.kill()
    child.wait()
    newest = saved(run)[-1]
    assert newest in ("step_000002", "step_000004")  # the latter on a machine that let this process wait
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')  # a line the kill tore
    done = paw_here("train", "quickstart", arguments, "--resume", "auto")
    assert f"resumed from {run / 'checkpoints' / newest}" in done.stdout
    assert_same(run, whole, read_metrics)


def test_stopped_at_once_before_the_first_checkpoint(paw_here, paw_start, arguments, whole, read_metrics, tmp_path):
    """By a second Ctrl-C; a run without a checkpoint starts over."""
    run = tmp_path / "run"
    arguments = arguments | {"run.dir": tmp_path, "run.name": "run"}
    child = paw_start("train", "quickstart", arguments, {"rollout.tasks": 200})
    wait_for(lambda: logged(run) > 0, child)
    child.send_signal(signal.SIGINT)
    while "again: stop now" not in child.stderr.readline():
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=10) == 130
    assert "stopped at once: there is no checkpoint yet" in child.stderr.read()
    assert logged(run) == 1 and saved(run) == []
    done = paw_here("train", "quickstart", arguments, "--resume", "auto")
    assert "no checkpoint yet" in done.stdout and "starting over" in done.stdout
    assert_same(run, whole, read_metrics)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_where_an_evaluation_is_due_loses_none(
    paw_here, arguments, whole, read_metrics, tmp_path, monkeypatch, number
):
    run = tmp_path / "run"
    arguments = arguments | {"run.dir": tmp_path, "run.name": "run"}
    optimize = train.optimize

    def stop_in_update_5(run, rows):
        if run.step == 4:
            os.kill(os.getpid(), number)
        return optimize(run, rows)

    with monkeypatch.context() as patch:
        patch.setattr(train, "optimize", stop_in_update_5)
        done = paw_here("train", "quickstart", arguments)
    assert f"{number.name}: finishing this update, then saving (again: stop now)" in done.stderr
    assert "stopped after update 5 of" in done.stdout and "the same command with --resume goes on" in done.stdout
    assert saved(run)[-1] == "step_000005" and "eval/success" not in read_metrics(run)[5]  # it did not wait for that
    assert (run / "hf" / "model.safetensors").is_file()
    info = json.loads((run / "run.json").read_text())
    assert info["ended"]["why"] == number.name and "eval/success" in read_metrics(whole)[5]
    paw_here("train", "quickstart", arguments, "--resume")
    assert json.loads((run / "run.json").read_text())["wall_s"] > info["wall_s"]
    assert_same(run, whole, read_metrics)


def test_a_chosen_checkpoint_goes_on(paw_here, arguments, whole, read_metrics, tmp_path):
    """From its own warm-up model: after an upgrade the cache has none for this code. A finished run stays as it is."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    again = arguments | {"run.dir": tmp_path, "run.name": "run"}
    paw_here("train", "quickstart", again, "--resume", "auto")
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert_same(run, whole, read_metrics)
    done = paw_here("train", "quickstart", again, {"warmup.seed": 5}, "--resume", "step_000002")
    assert f"resumed from {run}/checkpoints/step_000002" in done.stdout and "warm-up" not in done.stdout
    assert_same(run, whole, read_metrics)


def test_non_finite_updates_are_skipped_and_stop_the_run(paw_here, arguments, quick_model, tmp_path):
    """A world-model weight at the end of float32's range: the loss is finite or not, the gradient norm never is."""
    wild = {"wm.scale": 1e38, "run.save_every": 1, "run.max_skipped": 5, "optim.minibatch_samples": 1000}
    words = ["train", "quickstart", arguments | wild, {"run.dir": tmp_path, "run.name": "run"}]
    done = paw_here(*words, code=2)
    assert done.stderr.startswith("paw: stopped: 5 optimizer steps in a row had a non-finite loss")
    assert done.stderr.count("\n") == 1
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["optim/skipped"] for line in lines[1:]] == [1, 2, 3, 4]
    assert saved(run) == [f"step_{step:06d}" for step in (1, 2, 3, 4)]
    start = load_file(quick_model / "model.safetensors")
    for name in saved(run):
        now = load_file(run / "checkpoints" / name / "model.safetensors")
        assert all(torch.equal(now[key].view(torch.int32), start[key].view(torch.int32)) for key in now)
        assert not load_file(run / "checkpoints" / name / "optimizer.safetensors")
    assert paw_here(*words, "--resume", "auto", code=2).stderr == done.stderr  # it does not forget what it has skipped
