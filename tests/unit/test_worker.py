"""A worker's game may raise, hang, die or flood: the caller gets one EnvironmentFailure, no process stays behind."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paw.envs.worker import Worker
from paw.errors import EnvironmentFailure

GAME = '''
import os, time

class Game:
    """Says what it is told to; misbehaves on command."""

    admissible = ["look"]
    won = False

    def __init__(self, text="hello"):
        if text == "raise":
            raise RuntimeError("no such game\\nsecond line")
        self.text = text

    def reset(self):
        return self.text

    def step(self, command):
        if command == "raise":
            raise ValueError("boom\\nsecond line")
        if command == "hang":
            time.sleep(600)
        if command == "exit":
            os._exit(3)
        if command == "abort":
            os.abort()
        if command == "flood":
            return "x" * 100_000_000
        if command == "print":
            for _ in range(100):
                os.write(1, b"y" * 1_000_000)
                os.write(2, b"y" * 1_000_000)
        if command == "surrogate":
            return "a\\udcff"
        if command == "bytes":
            return b"\\xff"
        if command == "win":
            self.won = True
        if command == "pid":
            return str(os.getpid())
        return command

def flood_raw():
    """Writes past the protocol, as a C library that found the pipe would."""
    _raw(b"z" * 100_000_000)

def not_utf8():
    _raw(b"\\xff\\xfe{}\\n")

def not_json():
    _raw(b"hello\\n")

def _raw(data):
    for fd in range(3, 64):
        try:
            os.write(fd, data)
        except OSError:
            pass
    time.sleep(600)
'''


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
    assert worker.start(text="héllo 看") == "héllo 看"
    assert (worker.admissible, worker.won) == (["look"], False)
    pid = worker.step("pid")
    assert worker.step("win") == "win"
    assert worker.won
    worker.start(text="again")
    assert not worker.won
    assert worker.step("pid") == pid
    assert worker.step("print") == "print"  # what a game prints goes nowhere
    worker.close()
    assert not _alive(int(pid))


def test_a_broken_step_is_one_failure_and_a_new_start_heals(make):
    worker = make(timeout_s=2.0)
    for command, reason in (
        ("raise", "step raised ValueError: boom second line$"),
        ("exit", "exited with code 3 during step"),
        ("abort", "died of signal 6 during step"),
        ("flood", "step raised ValueError: an answer of 100000"),
        ("surrogate", "answered step: Invalid JSON"),
        ("bytes", "step raised TypeError"),
        ("hang", "no answer to step within 2 s"),
    ):
        assert worker.start(text="healed") == "healed"
        pid = int(worker.step("pid"))
        with pytest.raises(EnvironmentFailure, match=reason):
            worker.step(command)
        assert not _alive(pid)
        with pytest.raises(EnvironmentFailure, match="without a running game"):
            worker.step("look")


def test_a_game_that_cannot_start(make):
    with pytest.raises(EnvironmentFailure, match=r"start raised RuntimeError: no such game second line$"):
        make().start(text="raise")
    with pytest.raises(EnvironmentFailure, match="start raised AttributeError"):
        make("Missing").start()


def test_garbage_on_the_pipe(make):
    for game, reason in (
        ("flood_raw", "more than 1048576 bytes"),
        ("not_utf8", "answered start: Invalid JSON"),
        ("not_json", "answered start: Invalid JSON"),
    ):
        with pytest.raises(EnvironmentFailure, match=reason):
            make(game).start()


def test_no_orphan_when_the_parent_is_killed(make, tmp_path: Path):
    program = """
        from paw.envs.worker import Worker
        worker = Worker("worker_game:Game", timeout_s=600)
        worker.start()
        print(worker.step("pid"), flush=True)
        worker.step("hang")
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)
    parent.communicate()


def _alive(pid: int) -> bool:
    """Whether the process runs; one that has died and awaits its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
