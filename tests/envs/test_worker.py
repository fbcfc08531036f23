"""A worker's game may raise, hang, die or flood. The caller gets one EnvironmentFailure, and no
process is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paw.envs.workers.worker import Worker
from paw.errors import EnvironmentFailure

GAME = '''
import os, sys, time

class Game:
    """Says what it is told to say, in Python; misbehaves likewise."""

    admissible = ["look"]
    won = False

    def __init__(self, text="'hello'"):
        self.text = eval(text)

    def reset(self):
        return self.text

    def step(self, command):
        self.won = command == "'win'"
        return eval(command)

def raw(data):
    """Writes past the protocol, as a C library that found the pipe would."""
    for fd in range(3, 64):
        try:
            os.write(fd, data)
        except OSError:
            pass
    time.sleep(600)
'''
PID = "str(os.getpid())"


@pytest.fixture
def make(tmp_path: Path, monkeypatch):
    (tmp_path / "worker_game.py").write_text(GAME, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    workers = []

    def make_worker(name: str = "Game", timeout_s: float = 30.0) -> Worker:
        workers.append(Worker(f"worker_game:{name}", timeout_s=timeout_s))
        return workers[-1]

    yield make_worker
    for worker in workers:
        worker.close()


def test_plays_and_is_reused(make):
    worker = make()
    assert worker.start(text="'héllo 看'") == "héllo 看"
    assert worker.admissible == ["look"]
    assert worker.won is False
    pid = worker.step(PID)
    assert worker.step("'win'") == "win"
    assert worker.won
    # Ctrl-C in the terminal is for the trainer.
    for number in (signal.SIGINT, signal.SIGHUP):
        assert worker.step(f"os.kill(os.getpid(), {int(number)}) or 'on'") == "on"
    worker.start()
    assert not worker.won
    assert worker.step(PID) == pid
    # what a game prints is discarded
    printing = "[os.write(fd, b'y' * 10**6) for fd in (1, 2) for _ in range(100)]"
    assert worker.step(f"str(len({printing}))") == "200"
    worker.close()
    assert not _alive(int(pid))


@pytest.mark.slow
def test_whatever_breaks_is_one_failure_and_a_new_start_heals(make):
    worker = make(timeout_s=2.0)
    for command, reason in (
        (
            "int('x\\ny')",
            r"step raised ValueError: invalid literal for int\(\) with base 10: 'x\\ny'$",
        ),
        ("os._exit(3)", "exited with code 3 during step"),
        ("os.abort()", "died of signal 6 during step"),
        ("'x' * 10**7", "answered step with more than 1048576 bytes"),
        ("chr(0xdcff)", "answered step: Invalid JSON"),
        ("b'bytes'", "step raised TypeError"),
        ("raw(b'hello' + bytes([10]))", "answered step: Invalid JSON"),
        ("raw(b'z' * 10**8)", "more than 1048576 bytes"),
        ("raw(bytes([255, 254, 10]))", "answered step: Invalid JSON"),
        ("time.sleep(600)", "no answer to step within 2 s"),
    ):
        assert worker.start() == "hello"
        pid = int(worker.step(PID))
        with pytest.raises(EnvironmentFailure, match=reason):
            worker.step(command)
        assert not _alive(pid)
        with pytest.raises(EnvironmentFailure, match="without a running game"):
            worker.step(PID)
    with pytest.raises(EnvironmentFailure, match=r"start raised ValueError: [^\n]*$"):
        worker.start(text="int(chr(10))")
    with pytest.raises(EnvironmentFailure, match="start raised AttributeError"):
        make("Missing").start()


@pytest.mark.slow
def test_no_orphan_when_the_parent_is_killed(make, tmp_path: Path):
    program = """
from paw.envs.workers.worker import Worker
worker = Worker("worker_game:Game", timeout_s=600)
worker.start()
print(worker.step("str(os.getpid())"), flush=True)
worker.step("time.sleep(600)")
"""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=variables, stdout=subprocess.PIPE
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    """Whether the process runs. A dead process that its parent has not yet waited for does not
    count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
