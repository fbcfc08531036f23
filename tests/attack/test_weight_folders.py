"""Folders of weights that a killed trainer leaves in memory: removed by whoever comes next, and no
others."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from forked import CONTEXT

from paw import cli
from paw.rollouts.engines import weight_folders
from paw.rollouts.engines.servers import Servers
from paw.rollouts.engines.weight_folders import make_weight_folder, remove_abandoned

WAIT_S = 30.0
TRAINER = """
import sys, time
from pathlib import Path
from paw.rollouts.engines.weight_folders import make_weight_folder

folder = make_weight_folder(Path(sys.argv[1]))
(folder / "1").mkdir()
(folder / "1" / "model-00000.safetensors").write_bytes(bytes(1000))
print(folder, flush=True)
time.sleep(600)
"""
EMPTY = """
class Env:
    tasks = []

    def reset(self, task): ...
    def context(self): ...
    def step(self, response): ...
"""


@pytest.fixture
def start(paw_env):
    """`start(program, *words)` runs a trainer up to its sync: (process, its folder)."""
    started = []

    def run(program, *words):
        command = [sys.executable, "-c", program, *map(str, words)]
        child = subprocess.Popen(command, env=paw_env, stdout=subprocess.PIPE, text=True)
        started.append(child)
        return child, Path(child.stdout.readline().strip())

    yield run
    for child in started:
        with suppress(OSError):
            child.kill()
        child.wait()


def kill(child):
    child.send_signal(signal.SIGKILL)
    child.wait()


def test_weights_of_a_killed_trainer_are_removed_and_those_of_a_living_one_stay(start, tmp_path):
    (dead, left), (_, living) = (start(TRAINER, tmp_path) for _ in range(2))
    assert remove_abandoned([tmp_path]) == []
    kill(dead)
    (line,) = remove_abandoned([tmp_path])
    assert str(left) in line
    assert "weights of a run that was killed" in line
    assert not left.exists()
    assert (living / "1" / "model-00000.safetensors").stat().st_size == 1000


def test_a_trainer_whose_end_nobody_has_asked_for_is_dead(start, tmp_path):
    child, left = start(TRAINER, tmp_path)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert len(remove_abandoned([tmp_path])) == 1
    assert not left.exists()


def test_a_number_that_another_process_has_now_keeps_nothing(tmp_path):
    own = make_weight_folder(tmp_path)
    prefix, _, started, end = own.name.rsplit("-", 3)
    earlier = own.with_name(f"{prefix}-{os.getpid()}-{int(started) - 1}-{end}")
    earlier.mkdir()
    assert len(remove_abandoned([tmp_path])) == 1
    assert own.exists()
    assert not earlier.exists()


def test_what_is_not_surely_abandoned_and_ours_stays(start, tmp_path, monkeypatch):
    child, left = start(TRAINER, tmp_path)
    kill(child)
    kind, of, boot, namespace, pid, started, end = left.name.split("-")
    others = [
        "-".join(
            (kind, of, "0" * len(boot), namespace, pid, started, end)
        ),  # another machine, or before a boot
        "-".join((kind, of, boot, namespace + "1", pid, started, end)),  # another container
        "paw-weights-0123abcd",
        "paw-12345",
    ]
    for name in others:
        (tmp_path / name).mkdir()
    link = left.with_name(left.name + "link")
    link.symlink_to(tmp_path / others[0])
    with monkeypatch.context() as patch:
        patch.setattr(weight_folders.os, "getuid", lambda: os.geteuid() + 1)
        assert remove_abandoned([tmp_path]) == []
        assert left.exists()
    assert len(remove_abandoned([tmp_path, tmp_path / "none"])) == 1
    assert not left.exists()
    assert link.is_symlink()
    assert all((tmp_path / name).is_dir() for name in others)


def test_any_run_removes_at_its_start_what_a_killed_one_left(start, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(weight_folders, "MEMORY", tmp_path)
    child, left = start(TRAINER, tmp_path)
    kill(child)
    (tmp_path / "empty.py").write_text(EMPTY)  # a run that starts, and then has nothing to play
    words = [
        "train",
        "quickstart",
        "--run.dir",
        str(tmp_path / "runs"),
        "--env.name",
        f"{tmp_path / 'empty.py'}:Env",
    ]
    assert cli.main(words) == 2
    assert not left.exists()
    assert f"removed {left} (0.0 GiB): weights of a run that was killed" in capfd.readouterr().out


def sync_with_a_server(folder):
    """A trainer that has started a server and is killed during a sync."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    servers = Servers(command, [[]], folder / "servers", weights_dir=folder)
    (make_weight_folder(folder) / "model-00000.safetensors").write_bytes(bytes(1000))
    time.sleep(600)
    servers.close()


def wait_until(done):
    deadline = time.monotonic() + WAIT_S
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done()


def test_the_watcher_of_a_server_removes_what_its_trainer_leaves(tmp_path):
    trainer = CONTEXT.Process(target=sync_with_a_server, args=(tmp_path,))
    trainer.start()
    wait_until(lambda: [*tmp_path.glob("paw-weights-*/model-*")])
    trainer.kill()
    trainer.join()
    wait_until(lambda: not [*tmp_path.glob("paw-weights-*")])


def test_where_processes_cannot_be_told_apart_nothing_is_removed(tmp_path, monkeypatch):
    def no_proc(*_):
        raise FileNotFoundError

    monkeypatch.setattr(weight_folders, "_machine", no_proc)
    folder = make_weight_folder(tmp_path)
    assert remove_abandoned([tmp_path]) == []
    assert folder.is_dir()
    assert weight_folders.default_parent() in (Path("/dev/shm"), Path(tempfile.gettempdir()))
