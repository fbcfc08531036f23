"""`paw doctor --run`: what happened to a run, from its files alone, and a command that goes on from there."""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from paw.errors import UserError
from paw.state.claim import lock
from paw.state.record import RunRecord
from paw.tools.postmortem import examine, tell


def make_run(folder: Path, steps=range(3), about=None) -> Path:
    folder.mkdir()
    lines = [
        {"step": step, "reward/mean": 0.5, "health/env_failures": step, "optim/skipped": 1}
        for step in steps
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_text('[run]\nupdates = 9\n[model]\npath = "m"\n')
    RunRecord(folder, about or {}).write()
    return folder


def test_a_run_that_was_killed(tmp_path):
    run = make_run(tmp_path / "my run", steps=[0, 1, 4], about={"ranks": 2})
    (run / "metrics.jsonl").open("a").write('{"step": 5, "rew')
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()}
    found = examine(run)
    assert (found["state"], found["update"], found["updates"]) == ("killed", 4, 9)
    assert (found["missing_lines"], found["unreadable_lines"], found["skipped_steps"]) == (2, 1, 1)
    assert found["failures"]["health/env_failures"] == 5
    assert shlex.split(found["command"]) == [
        "paw", "train", f"{run}/config.toml", "--run.dir", str(tmp_path), "--run.name", "my run", "--gpus", "2",
        "--resume", "auto",
    ]  # fmt: skip
    assert tell(found) == [
        f"{run} ended at update 4 of 9 without a word: killed (-9, or for want of memory), a power cut, or a full disk",
        f"  last line written {found['last_written']}, resumed 0 times",
        "  last metrics: reward 0.5",
        "  trouble: 5 environment failures, 1 optimizer steps skipped, 1 lines that cannot be read, 2 lines missing",
        "  no checkpoint",
        f"to go on from the start, for want of a checkpoint: {found['command']}",
    ]
    assert json.loads(json.dumps(found)).keys() == found.keys()
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()}


def test_a_run_that_is_alive_and_one_that_has_not_begun(tmp_path):
    run = make_run(tmp_path / "run", steps=[])
    found = examine(run)
    assert found["state"] == "not begun" and "--resume" not in found["command"]
    (run / "config.toml").unlink()
    assert examine(run)["command"] is None
    with lock(run):
        found = examine(run)
        assert (found["state"], found["process"]) == ("running", str(os.getpid()))
        assert tell(found)[-1] == f"to stop it, saved: kill {os.getpid()}"
    for path in run.iterdir():
        path.unlink()
    with pytest.raises(UserError, match="this is no run directory"):
        examine(run)


def test_a_run_that_said_why_it_ended(tmp_path):
    run = make_run(tmp_path / "run")
    for error, why in (
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (UserError("gone"), "gone"),
    ):
        with pytest.raises(type(error)), RunRecord(run, {}):
            raise error
        assert tell(examine(run))[0] == f"{run} ended with an error at update 2 of 9: {why}"
    with RunRecord(run, {}) as record:
        record.end("stopped", "SIGTERM")
    assert tell(examine(run))[0].endswith("was told to stop at update 2 of 9: SIGTERM")


@pytest.mark.slow
def test_the_command_goes_on_from_what_verifies(paw_here, quick_run, tmp_path):
    """Of a real run: told by the command line, and the command that it gives is run."""
    run = tmp_path / "moved run"
    shutil.copytree(quick_run, run)
    said = paw_here("doctor", "--run", run).stdout.splitlines()
    assert said[0] == f"{run} finished at update 2 of 2" and "  ok       step_000002" in said
    command = shlex.split(said[-1].removeprefix("to train on: "))
    assert command[-2:] == ["--run.updates", "4"]
    done = paw_here(*command[1:-1], "3")
    assert f"resumed from {run}/checkpoints/step_000002" in done.stdout
    weights = run / "checkpoints" / "step_000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    found = json.loads(paw_here("doctor", "--run", run, "--json").stdout)
    assert (found["resumes_from"], found["state"], len(found["resumed"])) == (
        "step_000002",
        "finished",
        1,
    )
    assert found["checkpoints"]["step_000003"].startswith("(model.safetensors): ")
    for path in (run / "checkpoints").glob("*/manifest.json"):
        path.unlink()
    done = paw_here("doctor", "--run", run, code=1)
    assert done.stdout.endswith("no checkpoint can be used: train anew under another --run.name\n")
