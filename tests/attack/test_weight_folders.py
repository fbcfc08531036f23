"""The weight folders that a killed trainer leaves in memory are removed by the next process. No
other folders are removed."""

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
from processes import wait_until

from paw import cli
from paw.rollouts.engines import weight_folders
from paw.rollouts.engines.servers import Servers
from paw.rollouts.engines.weight_folders import make_weight_folder, remove_abandoned

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
    """`start(program, *words)` runs a trainer up to its sync. Returns (process, its folder)."""
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
    killed, abandoned = start(TRAINER, tmp_path)
    _, living = start(TRAINER, tmp_path)
    assert remove_abandoned([tmp_path]) == []
    kill(killed)
    (message,) = remove_abandoned([tmp_path])
    assert str(abandoned) in message
    assert "weights of a run that was killed" in message
    assert not abandoned.exists()
    assert (living / "1" / "model-00000.safetensors").stat().st_size == 1000


def test_a_trainer_whose_end_nobody_has_asked_for_is_dead(start, tmp_path):
    child, abandoned = start(TRAINER, tmp_path)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it remains a zombie
    assert len(remove_abandoned([tmp_path])) == 1
    assert not abandoned.exists()


def test_a_number_that_another_process_has_now_keeps_nothing(tmp_path):
    own_folder = make_weight_folder(tmp_path)
    prefix, _, started, namespace = own_folder.name.rsplit("-", 3)
    earlier = own_folder.with_name(f"{prefix}-{os.getpid()}-{int(started) - 1}-{namespace}")
    earlier.mkdir()
    assert len(remove_abandoned([tmp_path])) == 1
    assert own_folder.exists()
    assert not earlier.exists()


def test_what_is_not_surely_abandoned_and_ours_stays(start, tmp_path, monkeypatch):
    child, abandoned = start(TRAINER, tmp_path)
    kill(child)
    paw, weights, boot, namespace, *numbers = abandoned.name.split("-")
    of_another_boot = "-".join([paw, weights, "0" * len(boot), namespace, *numbers])
    of_another_container = "-".join([paw, weights, boot, namespace + "1", *numbers])
    others = [of_another_boot, of_another_container, "paw-weights-0123abcd", "paw-12345"]
    for name in others:
        (tmp_path / name).mkdir()
    link_folder = abandoned.with_name(abandoned.name + "link")
    link_folder.symlink_to(tmp_path / others[0])
    with monkeypatch.context() as patch:
        patch.setattr(weight_folders.os, "getuid", lambda: os.geteuid() + 1)
        assert remove_abandoned([tmp_path]) == []
        assert abandoned.exists()
    assert len(remove_abandoned([tmp_path, tmp_path / "none"])) == 1
    assert not abandoned.exists()
    assert link_folder.is_symlink()
    assert all((tmp_path / name).is_dir() for name in others)


def test_any_run_removes_at_its_start_what_a_killed_one_left(start, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(weight_folders, "MEMORY", tmp_path)
    child, abandoned = start(TRAINER, tmp_path)
    kill(child)
    (tmp_path / "empty.py").write_text(EMPTY)  # a run that starts and then has nothing to play
    environment = f"{tmp_path / 'empty.py'}:Env"
    runs_folder = str(tmp_path / "runs")
    assert (
        cli.main(["train", "quickstart", "--run.dir", runs_folder, "--env.name", environment]) == 2
    )
    assert not abandoned.exists()
    assert (
        f"removed {abandoned} (0.0 GiB): weights of a run that was killed" in capfd.readouterr().out
    )


def sync_with_a_server(folder):
    """A trainer that has started a server is killed during a sync."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    servers = Servers(command, [[]], folder / "servers", weights_dir=folder)
    (make_weight_folder(folder) / "model-00000.safetensors").write_bytes(bytes(1000))
    time.sleep(600)
    servers.close()


def test_the_watcher_of_a_server_removes_what_its_trainer_leaves(tmp_path):
    trainer = CONTEXT.Process(target=sync_with_a_server, args=(tmp_path,))
    trainer.start()
    wait_until(lambda: [*tmp_path.glob("paw-weights-*/model-*")])
    trainer.kill()
    trainer.join()
    wait_until(lambda: not [*tmp_path.glob("paw-weights-*")])


def test_nothing_is_removed_if_processes_cannot_be_told_apart(tmp_path, monkeypatch):
    def no_proc(*_):
        raise FileNotFoundError

    monkeypatch.setattr(weight_folders, "_machine", no_proc)
    folder = make_weight_folder(tmp_path)
    assert remove_abandoned([tmp_path]) == []
    assert folder.is_dir()
    assert weight_folders.default_parent() in (Path("/dev/shm"), Path(tempfile.gettempdir()))
