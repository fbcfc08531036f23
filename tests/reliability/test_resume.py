"""A run that is killed, stopped or damaged goes on bit for bit; one that meets non-finite numbers stops unharmed."""

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
    ours, theirs = (checkpoint._read_manifest(folder / "checkpoints" / last) for folder in (run, whole))
    assert ours[0] == theirs[0]
    assert (run / "hf" / "model.safetensors").read_bytes() == (whole / "hf" / "model.safetensors").read_bytes()
    assert read_metrics(run) == read_metrics(whole)
    assert (run / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()


def test_killed_between_checkpoints(paw, paw_start, arguments, whole, read_metrics, tmp_path):
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
    done = paw("train", "quickstart", arguments, "--resume", "auto")
    assert f"resumed from {run / 'checkpoints' / newest}" in done.stdout
    assert_same(run, whole, read_metrics)


def test_killed_before_the_first_checkpoint(paw, paw_start, arguments, whole, read_metrics, tmp_path):
    run = tmp_path / "run"
    arguments = arguments | {"run.dir": tmp_path, "run.name": "run", "run.save_every": 50}
    child = paw_start("train", "quickstart", arguments)
    wait_for(lambda: logged(run) > 1, child)
    child.kill()
    child.wait()
    assert saved(run) == []
    done = paw("train", "quickstart", arguments, "--resume", "auto")
    assert "no checkpoint yet" in done.stdout and "starting over" in done.stdout
    assert_same(run, whole, read_metrics)


def test_sigterm_finishes_the_update_and_saves(paw, paw_start, arguments, whole, read_metrics, tmp_path):
    run = tmp_path / "run"
    arguments = arguments | {"run.dir": tmp_path, "run.name": "run"}
    child = paw_start("train", "quickstart", arguments)
    wait_for(lambda: logged(run) > 1, child)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=60) == 0
    assert "finishing this update, then saving" in child.stderr.read()
    done = logged(run) - 1
    assert 1 <= done < UPDATES and saved(run)[-1] == f"step_{done:06d}"
    assert (run / "report.html").is_file() and (run / "hf" / "model.safetensors").is_file()
    before = json.loads((run / "run.json").read_text())["wall_s"]
    paw("train", "quickstart", arguments, "--resume", "auto")
    assert_same(run, whole, read_metrics)
    assert json.loads((run / "run.json").read_text())["wall_s"] > before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_where_an_evaluation_is_due_loses_none(
    paw, paw_here, arguments, whole, read_metrics, tmp_path, monkeypatch, number
):
    run = tmp_path / "run"
    arguments = arguments | {"run.dir": tmp_path, "run.name": "run"}
    optimize = train.optimize

    def stop_in_update_5(run, rows):
        if run.step == 4:
            os.kill(os.getpid(), number)
        return optimize(run, rows)

    monkeypatch.setattr(train, "optimize", stop_in_update_5)
    done = paw_here("train", "quickstart", arguments)
    assert "stopped after update 5 of" in done.stdout and "the same command with --resume goes on" in done.stdout
    assert saved(run)[-1] == "step_000005" and "eval/success" not in read_metrics(run)[5]  # it did not wait for that
    assert json.loads((run / "run.json").read_text())["ended"]["why"] == number.name
    assert "eval/success" in read_metrics(whole)[5]
    paw("train", "quickstart", arguments, "--resume")
    assert_same(run, whole, read_metrics)


def test_a_chosen_checkpoint_goes_on(paw, arguments, whole, read_metrics, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    oldest, *_ = saved(run)
    done = paw("train", "quickstart", arguments, {"run.dir": tmp_path, "run.name": "run"}, "--resume", oldest)
    assert f"resumed from {run / 'checkpoints' / oldest}" in done.stdout and oldest != saved(whole)[-1]
    assert_same(run, whole, read_metrics)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_second_signal_stops_at_once(paw, paw_start, arguments, whole, read_metrics, tmp_path, number, code):
    run = tmp_path / "run"
    arguments = arguments | {"run.dir": tmp_path, "run.name": "run", "rollout.tasks": 200}
    child = paw_start("train", "quickstart", arguments)
    wait_for(lambda: logged(run) > 0, child)
    child.send_signal(number)
    while "again: stop now" not in child.stderr.readline():
        assert child.poll() is None
    child.send_signal(number)
    assert child.wait(timeout=10) == code
    if number == signal.SIGINT:
        assert "stopped at once: " in child.stderr.read()
    assert logged(run) == 1 and saved(run) == []
    paw("train", "quickstart", arguments, {"rollout.tasks": 8}, "--resume", "auto")
    assert_same(run, whole, read_metrics)


@pytest.mark.parametrize("damage", ["flipped byte", "missing"])
def test_a_damaged_checkpoint_is_passed_over(paw, arguments, whole, read_metrics, tmp_path, damage):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    file = run / "checkpoints" / "step_000006" / "optimizer.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    done = paw("train", "quickstart", arguments, {"run.dir": tmp_path, "run.name": "run"}, "--resume", "auto")
    assert f"{run / 'checkpoints' / 'step_000006'} is damaged (optimizer.safetensors)" in done.stdout
    assert "using step_000004" in done.stdout
    assert_same(run, whole, read_metrics)


def test_only_damaged_checkpoints_are_an_error(paw, arguments, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for file in run.glob("checkpoints/*/model.safetensors"):
        file.write_bytes(b"")
    metrics = (run / "metrics.jsonl").read_bytes()
    done = paw("train", "quickstart", arguments, {"run.dir": tmp_path, "run.name": "run"}, "--resume", "auto", code=2)
    assert done.stderr.startswith("paw: checkpoint ") and "no other checkpoint" in done.stderr
    assert done.stderr.count("\n") == 1
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_resuming_a_finished_run_changes_nothing(paw, arguments, whole, read_metrics, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    paw("train", "quickstart", arguments, {"run.dir": tmp_path, "run.name": "run"}, "--resume", "auto")
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert_same(run, whole, read_metrics)


def test_another_warm_up_does_not_change_a_run_begun(paw, arguments, whole, read_metrics, tmp_path):
    """As after an upgrade: the cache has no model for this code, the run goes on from its own."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step_000006")
    again = {"run.dir": tmp_path, "run.name": "run", "warmup.seed": 5}
    done = paw("train", "quickstart", arguments, again, "--resume", "auto")
    assert "warm-up" not in done.stdout
    assert_same(run, whole, read_metrics)


def test_non_finite_updates_are_skipped_and_stop_the_run(paw, arguments, quick_model, tmp_path):
    """A world-model weight at the end of float32's range: the loss is finite or not, the gradient norm never is."""
    wild = {"wm.scale": 1e38, "run.save_every": 1, "run.max_skipped": 5, "optim.minibatch_samples": 1000}
    words = ["train", "quickstart", arguments | wild, {"run.dir": tmp_path, "run.name": "run"}]
    done = paw(*words, code=2)
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
    assert paw(*words, "--resume", "auto", code=2).stderr == done.stderr  # it does not forget what it has skipped
