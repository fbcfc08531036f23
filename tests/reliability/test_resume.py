"""A run that is killed or stopped continues bit for bit; one that meets non-finite numbers stops
unharmed."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paw import trainer
from paw.checkpoint import files as checkpoint

pytestmark = pytest.mark.slow
UPDATES = 5


@pytest.fixture
def command(quick, quick_run, tmp_path):
    """The words of every run here, in the folder `run`; `quick_run` has made the model."""
    sizes = {
        "run.updates": UPDATES,
        "run.save_every": 2,
        "run.keep": 9,
        "rollout.tasks": 2,
        "eval.every": 3,
    }
    return ["train", "quickstart", quick | sizes | {"run.dir": tmp_path, "run.name": "run"}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of the run that nothing interrupts; the first test that needs it makes it."""
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def assert_same(paw_here, command, whole, read_metrics, tmp_path):
    """A function that asserts that the run in `run` ended as the one that nothing interrupts."""
    if not whole.exists():
        paw_here(*command, {"run.dir": whole.parent})

    def check() -> None:
        run = tmp_path / "run"
        last_checkpoint = f"checkpoints/step_{UPDATES:06d}"
        manifest, whole_manifest = (
            checkpoint.read_manifest(folder / last_checkpoint) for folder in (run, whole)
        )
        assert manifest[0] == whole_manifest[0]
        for name in ("hf/model.safetensors", "samples.jsonl", "episodes.jsonl"):
            assert (run / name).read_bytes() == (whole / name).read_bytes()
        assert read_metrics(run) == read_metrics(whole)

    return check


def wait_for(condition, child):
    deadline = time.monotonic() + 120
    while not condition():
        assert child.poll() is None, (
            f"ended too early, exit {child.returncode}: {child.stderr.read()}"
        )
        assert time.monotonic() < deadline
        time.sleep(0.002)


def logged(run: Path) -> int:
    """The number of lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


KILLED = """
import os, signal
from paw import trainer
optimize = trainer.optimize
def killed(run, samples):
    if run.step == 3:
        run.settle()
        os.kill(os.getpid(), signal.SIGKILL)
    return optimize(run, samples)
trainer.optimize = killed
"""


def test_killed_between_checkpoints(paw, paw_here, command, assert_same, tmp_path):
    """In the fourth update. Then resumed once more from a chosen checkpoint, with its own warm-up
    model: after an upgrade the cache holds another one."""
    run = tmp_path / "run"
    (tmp_path / "patch.py").write_text(KILLED)
    paw(*command, code=-signal.SIGKILL, env={"FORKED_PATCH": str(tmp_path / "patch.py")})
    assert logged(run) == 4
    assert saved(run) == ["step_000002"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')  # a line the kill tore
    finished = paw_here(*command, "--resume", "auto")
    assert f"resumed from {run}/checkpoints/step_000002" in finished.stdout
    assert_same()
    finished = paw_here(*command, {"warmup.seed": 5}, "--resume", "step_000002")
    assert f"resumed from {run}/checkpoints/step_000002" in finished.stdout
    assert "warm-up" not in finished.stdout
    assert_same()


def test_stopped_at_once_before_the_first_checkpoint(
    paw_here, paw_start, command, assert_same, tmp_path
):
    """A second Ctrl-C stops at once; a run without a checkpoint starts over."""
    run = tmp_path / "run"
    child = paw_start(*command, {"rollout.tasks": 200})
    wait_for(lambda: logged(run) > 0, child)
    child.send_signal(signal.SIGINT)
    while "again: stop now" not in child.stderr.readline():
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=10) == 130
    assert "stopped at once: there is no checkpoint yet" in child.stderr.read()
    assert logged(run) == 1
    assert saved(run) == []
    finished = paw_here(*command, "--resume", "auto")
    assert "no checkpoint yet" in finished.stdout
    assert "starting over" in finished.stdout
    assert_same()


def test_a_stop_where_an_evaluation_is_due_loses_none(
    paw_here, command, assert_same, whole, read_metrics, tmp_path, monkeypatch
):
    """A finished run stays as it is."""
    run = tmp_path / "run"
    optimize = trainer.optimize

    def stop_in_update_3(run, samples):
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return optimize(run, samples)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "optimize", stop_in_update_3)
        finished = paw_here(*command)
    assert "SIGTERM: finishing this update, then saving (again: stop now)" in finished.stderr
    assert "stopped after update 3 of" in finished.stdout
    assert "the same command with --resume continues" in finished.stdout
    # It did not wait for that.
    assert saved(run)[-1] == "step_000003"
    assert "eval/success" not in read_metrics(run)[3]
    assert (run / "hf" / "model.safetensors").is_file()
    assert "eval/success" in read_metrics(whole)[3]
    info = json.loads((run / "run.json").read_text())
    assert info["ended"]["why"] == "SIGTERM"
    paw_here(*command, "--resume")
    assert json.loads((run / "run.json").read_text())["wall_s"] > info["wall_s"]
    assert_same()
    metrics = (run / "metrics.jsonl").read_bytes()
    paw_here(*command, "--resume")
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert_same()


def test_non_finite_updates_are_skipped_and_stop_the_run(
    paw_here, command, quick_model, read_metrics, tmp_path
):
    """A world-model weight at the end of float32's range: the loss is finite or not, the
    gradient norm never is."""
    wild_settings = {"wm.scale": 1e38, "optim.minibatch_samples": 1000, "rollout.tasks": 4}
    wild_settings |= {"run.save_every": 1, "run.max_skipped": 4}
    finished = paw_here(*command, wild_settings, code=2)
    assert finished.stderr.startswith(
        "paw: stopped: 4 optimizer steps in a row had a non-finite loss"
    )
    assert finished.stderr.count("\n") == 1
    run = tmp_path / "run"
    assert [line["optim/skipped"] for line in read_metrics(run)[1:]] == [1, 2, 3]
    assert saved(run) == ["step_000001", "step_000002", "step_000003"]
    start_weights = load_file(quick_model / "model.safetensors")
    for name in saved(run):
        weights = load_file(run / "checkpoints" / name / "model.safetensors")
        assert all(
            torch.equal(weights[key].view(torch.int32), start_weights[key].view(torch.int32))
            for key in weights
        )
        assert not load_file(run / "checkpoints" / name / "optimizer.safetensors")
    # It does not forget what it has skipped.
    resumed = paw_here(*command, wild_settings, "--resume", "auto", code=2)
    assert resumed.stderr == finished.stderr
