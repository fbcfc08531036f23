"""Ranks that are killed, stopped or left by their launcher: the others end, and a line says which
one and why."""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
import tomli_w
from test_train_ranks import ENV, start  # noqa: F401

from paw.checkpoint import restore

pytestmark = pytest.mark.slow
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


ENDS = """
import os, sys
sys.path.append("{folder}")
from deadly import Counter, Deadly
class End(Counter):
    def step(self, response):
        if os.environ["RANK"] == "1" and self.id.startswith("train"):
            os._exit(0)
        return super().step(response)
class Ends(Deadly):
    def make(self):
        return End()
"""

HOLDS = """
import os, sys
sys.path.append("{folder}")
from deadly import Counter, Deadly, holds_the_interpreter
class Hold(Counter):
    def step(self, response):
        if os.environ["RANK"] == "1" and self.id.startswith("train"):
            open("{once}", "w").close()
            holds_the_interpreter()
        return super().step(response)
class Holds(Deadly):
    def make(self):
        return Hold()
"""


@pytest.fixture
def recipe(start, tmp_path):
    """Of a long run."""
    tree = {
        "run": {
            "dir": str(tmp_path),
            "name": "run",
            "updates": 5000,
            "save_every": 1,
            "peer_timeout_s": 5.0,
        },
        "model": {"path": str(start), "device": "cpu"},
        "env": ENV.model_dump(exclude_none=True),
        "rollout": {
            "tasks": 4,
            "group_size": 4,
            "max_prompt_tokens": 256,
            "max_response_tokens": 3,
        },
        "eval": {"every": 0, "games": 2},
    }
    (tmp_path / "long.toml").write_text(tomli_w.dumps(tree))
    return tmp_path / "long.toml"


def launched(recipe, *options):
    """`paw train` from the interpreter's start on, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "paw", "train", str(recipe), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a script's background ignores it
    )


def ranks_of(launcher, folder):
    """Processes of the two ranks, after an update."""
    until(
        lambda: launcher.poll() is not None or any((folder / "run" / "checkpoints").glob("step_*")),
        200,
    )
    ranks = [rank for watched in children(launcher.pid) for rank in children(watched)]
    assert len(ranks) == 2, launcher.stderr.read()
    return ranks


@pytest.fixture
def running(recipe, paw_start, tmp_path):
    """A long run in two ranks after an update: (launcher, processes of the ranks); whatever is left
    is killed."""
    launcher = paw_start("train", recipe, "--gpus", "2")
    ranks = ranks_of(launcher, tmp_path)
    yield launcher, ranks
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return not re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False


def listening(pid):
    """Local addresses, as /proc has them, of the sockets on which a process accepts connections."""
    inodes = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return [
        row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
    ]


def test_nothing_listens_beyond_this_machine_and_ranks_die_with_their_launcher(recipe, tmp_path):
    launcher = launched(recipe, "--gpus", "2")
    try:
        ranks = ranks_of(launcher, tmp_path)
        found = [address for pid in (*children(launcher.pid), *ranks) for address in listening(pid)]
        assert found
        assert set(found) <= LOOPBACK
        launcher.kill()
        until(lambda: not any(map(alive, ranks)), 20)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_is_named(running, tmp_path, lost):
    launcher, ranks = running
    os.kill(ranks[lost], signal.SIGKILL)
    assert launcher.wait(60) in (1, 3)
    errors = launcher.stderr.read()
    assert f"paw: rank {lost} was killed by SIGKILL; checkpoints are kept (--resume auto)" in errors
    assert "Traceback" not in errors
    assert restore.newest(tmp_path / "run" / "checkpoints")


def test_a_rank_that_an_environment_ends_is_named(recipe, paw_start, tmp_path):
    (tmp_path / "mine.py").write_text(ENDS.format(folder=Path(__file__).parents[1] / "support"))
    tree = tomllib.loads(recipe.read_text()) | {"env": {"name": f"{tmp_path}/mine.py:Ends"}}
    recipe.write_text(tomli_w.dumps(tree))
    launcher = paw_start("train", recipe, "--gpus", "2")
    code = launcher.wait(120)
    errors = launcher.stderr.read()
    assert code == 1, errors
    vanished = "ended inside code that is not PaW's, with exit code 0 (os._exit? see env.processes)"
    assert f"paw: rank 1 {vanished}; checkpoints are kept (--resume auto)\n" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("lost", [0, 1])
def test_a_stopped_rank_is_named_and_ends_the_run(running, lost):
    silent = r"paw: rank 1 has been silent for \d+ s \(run\.peer_timeout_s = 5\), last in phase"
    launcher, ranks = running
    os.kill(ranks[lost], signal.SIGSTOP)
    assert launcher.wait(60) == 3
    errors = launcher.stderr.read()
    assert f"paw: rank {lost} was stopped by SIGSTOP" in errors
    assert "Traceback" not in errors
    assert lost == 0 or re.search(silent, errors)  # rank 0's standard error is the launcher's


def test_two_sigterms_end_ranks_that_wait_for_a_stopped_one(running):
    launcher, ranks = running
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(1.0)  # the other one waits by now
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(20) != 0
    assert not any(map(alive, ranks))


def test_two_ctrl_cs_end_ranks_whose_environment_holds_the_interpreter(recipe, tmp_path):
    once = tmp_path / "once"
    (tmp_path / "mine.py").write_text(
        HOLDS.format(folder=Path(__file__).parents[1] / "support", once=once)
    )
    tree = tomllib.loads(recipe.read_text()) | {"env": {"name": f"{tmp_path}/mine.py:Holds"}}
    recipe.write_text(tomli_w.dumps(tree))
    launcher = launched(recipe, "--gpus", "2")
    try:
        until(lambda: launcher.poll() is not None or once.exists(), 200)
        os.killpg(launcher.pid, signal.SIGINT)
        lines = iter(launcher.stderr.readline, "")
        assert any("SIGINT: Python does not answer" in line for line in lines)
        os.killpg(launcher.pid, signal.SIGINT)
        errors = launcher.communicate(timeout=20)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 130
    assert (
        "paw: stopped at once by a second SIGINT; checkpoints are kept (--resume auto)\n" in errors
    )


def test_a_closed_terminal_lets_ranks_save(recipe, tmp_path):
    """It sends SIGHUP to all processes, the launcher too, as Ctrl-C sends SIGINT."""
    launcher = launched(recipe, "--gpus", "2", "--run.save_every", "0")
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        until(
            lambda: (
                launcher.poll() is not None
                or (metrics.exists() and metrics.read_text().count("\n") > 1)
            ),
            200,
        )
        os.killpg(launcher.pid, signal.SIGHUP)
        errors = launcher.communicate(timeout=60)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 0
    assert "SIGHUP: finishing this update, then saving" in errors
    assert restore.newest(tmp_path / "run" / "checkpoints")


def test_ctrl_c_while_it_loads_ends_it_without_an_abort(recipe):
    """At moments from the interpreter's start to the first episodes, as the terminal sends it: to
    all processes."""
    two = ("--gpus", "2")
    for delay, *options in ((0.2,), (1.6,), (4.0,), (0.8, *two), (2.5, *two), (6.0, *two)):
        child = launched(recipe, *options, "--run.name", f"run{delay}")
        time.sleep(delay)
        before = children(child.pid)
        os.killpg(child.pid, signal.SIGINT)
        try:
            errors = child.communicate(timeout=60)[1]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        if "finishing this update" in errors:  # it had loaded already
            assert child.returncode == 0
            continue
        assert child.returncode in (130, -signal.SIGINT), (delay, child.returncode, errors)
        assert "SIGABRT" not in errors
        assert "terminate called" not in errors
        until(lambda pids=before: not any(map(alive, pids)), 20)
