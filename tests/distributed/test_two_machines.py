"""Two machines that have a run's folder in common and nothing else: each its own home and working
folder."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from forked import run_ranks
from test_train_ranks import distance, start, train, two_machines, weights, words_of  # noqa: F401

pytestmark = pytest.mark.slow


def agents(folder, words, stack):
    """`torchrun -m paw WORDS` on each of two machines, one rank a machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
    ]
    torchrun += ["--rdzv-endpoint", meeting, "--local-addr", "127.0.0.1", "--rdzv-id", "test"]
    started = []
    for rank in range(2):
        machine = folder / f"machine{rank}"
        env = os.environ | {"HOME": str(machine / "home"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *torchrun, "--node-rank", str(rank), "-m", "paw", *words]
        pipes = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
        }
        started.append(subprocess.Popen(command, env=env, cwd=machine, **pipes))
        stack.callback(kill, started[-1])
    return started


def kill(agent):
    """The machine is gone: torchrun, which its ranks outlive for a moment, and they."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    ranks = children.read_text().split() if children.exists() else []
    for pid in (agent.pid, *map(int, ranks)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_two_machines_train_are_killed_and_go_on_to_the_weights_of_one(
    start,
    tmp_path,
    monkeypatch,
):
    """Each holds all weights (model.shard); the model's folder is on the first alone."""
    for name in ("PAW_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    words = words_of(
        tmp_path,
        start,
        "run",
        run_dir=str(tmp_path / "runs"),
        model_path="model",
        model_shard="node",
        run_save_every=1,
    )
    words += ["--eval.every", "0"]
    machines = [tmp_path / f"machine{rank}" for rank in range(2)]
    for machine in machines:
        (machine / "home").mkdir(parents=True)
    (tmp_path / "machine0" / "model").symlink_to(start)
    run = tmp_path / "runs" / "run"
    with ExitStack() as stack:
        first, second = agents(tmp_path, [*words, "--run.updates", "500"], stack)
        until = time.monotonic() + 60
        while not list((run / "checkpoints").glob("step_*")):
            assert first.poll() is None, first.communicate()[1]
            assert time.monotonic() < until, first.communicate()[1]
            time.sleep(0.1)
        kill(second)
        assert "another rank has ended, this one cannot go on" in first.communicate(timeout=30)[1]
    step = max(
        int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*")
    )
    words = [*words, "--run.updates", str(step + 1)]
    again = run_ranks(
        [[*words, "--resume"]] * 2,
        machines,
        on_host=1,
        homes=[machine / "home" for machine in machines],
    )
    assert [code for code, _ in again] == [0, 0], again
    one = train(tmp_path, start, "one", "--eval.every", "0", run_updates=step + 1)
    assert 0 < distance(weights(run), weights(one)) < 1e-5
    assert [path.name for path in (tmp_path / "machine1").iterdir()] == ["home"]
    copies = (tmp_path / "machine1" / "home" / ".cache" / "paw").iterdir()
    assert [path.name[:6] for path in copies] == ["model-"]


GAMES = """
from paw.envs.alfworld.factory import AlfworldFactory
from paw.envs.settings import AlfworldConfig
class Games(AlfworldFactory):
    def __init__(self):
        super().__init__(AlfworldConfig(difficulty="tiny"))
    def fingerprint(self):
        return "version {}"
"""


def test_what_one_machine_lacks_is_told_on_both(start, tmp_path):
    words_of(tmp_path, start, "whole", run_updates=1)
    for machine in (tmp_path / "machine0", tmp_path / "machine1"):
        machine.mkdir()
        (machine / "games.py").write_text(GAMES.format(machine.name))
    (tmp_path / "machine0" / "mine.py").write_text("class Say: ...\n")
    for option, name, why in (
        (
            "--run.callbacks",
            "mine.py:Say",
            "rank 1: run.callbacks: 'mine.py:Say': there is no file",
        ),  # before they have met
        ("--env.name", "games.py:Games", "rank 1 has other games than rank 0"),
    ):
        found = two_machines(tmp_path, tmp_path / "whole.toml", option, name)
        assert found[0][0] in (2, 3), found
        assert found[1][0] == 2, found
        assert found[0][1].startswith(f"paw: {why}")
        assert found[0][1].count("\n") == 1
        assert name.partition(":")[0] in found[0][1]
        assert name.partition(":")[0] in found[1][1]
