"""Two machines that share only the run's folder. Each has its own home and working folder."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import pytest
from forked import run_ranks
from processes import children
from test_train_ranks import (  # noqa: F401
    distance,
    exit_codes,
    start,
    train,
    two_machines,
    weights,
    words_of,
)

pytestmark = pytest.mark.slow


def agents(folder, words, stack):
    """`torchrun -m paw WORDS` on each of two machines, with one rank per machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    torchrun = [
        "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", meeting, "--local-addr", "127.0.0.1", "--rdzv-id", "test",
    ]  # fmt: skip
    started = []
    for rank in range(2):
        machine = folder / f"machine{rank}"
        env = os.environ | {"HOME": str(machine / "home"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *torchrun, "--node-rank", str(rank), "-m", "paw", *words]
        agent = subprocess.Popen(
            command,
            env=env,
            cwd=machine,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(agent)
        stack.callback(kill, agent)
    return started


def kill(agent):
    """Kill a machine: torchrun, and its ranks, which would outlive it for a moment."""
    for pid in (agent.pid, *children(agent.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_two_machines_train_are_killed_and_go_on_to_the_weights_of_one(
    start, tmp_path, monkeypatch
):
    """Each machine holds all weights (model.shard). Only the first one has the model's folder."""
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
        deadline = time.monotonic() + 60
        while not list((run / "checkpoints").glob("step_*")):
            assert first.poll() is None, first.communicate()[1]
            assert time.monotonic() < deadline, first.communicate()[1]
            time.sleep(0.1)
        kill(second)
        assert (
            "another rank has ended, so this one cannot continue"
            in first.communicate(timeout=30)[1]
        )

    newest = max((run / "checkpoints").glob("step_*"))
    updates = int(newest.name.removeprefix("step_")) + 1
    words = [*words, "--run.updates", str(updates), "--resume"]
    homes = [machine / "home" for machine in machines]
    resumed = run_ranks([words, words], machines, on_host=1, homes=homes)
    assert exit_codes(resumed) == [0, 0], resumed
    one = train(tmp_path, start, "one", "--eval.every", "0", run_updates=updates)
    assert 0 < distance(weights(run), weights(one)) < 1e-5
    assert [path.name for path in machines[1].iterdir()] == ["home"]
    (copied_model,) = (machines[1] / "home" / ".cache" / "paw").iterdir()
    assert copied_model.name.startswith("model-")


GAMES = """
from paw.envs.alfworld.factory import AlfworldFactory
from paw.envs.settings import AlfworldConfig
class Games(AlfworldFactory):
    def __init__(self):
        super().__init__(AlfworldConfig(difficulty="tiny"))
    def fingerprint(self):
        return "version {}"
"""


@pytest.mark.parametrize(
    ("option", "name", "problem"),
    [
        # It fails before the ranks have met.
        (
            "--run.callbacks",
            "mine.py:Say",
            "rank 1: run.callbacks: 'mine.py:Say': there is no file",
        ),
        ("--env.name", "games.py:Games", "rank 1 has different games from rank 0"),
    ],
)
def test_what_one_machine_lacks_is_reported_on_both(start, tmp_path, option, name, problem):
    words_of(tmp_path, start, "whole", run_updates=1)
    for machine in (tmp_path / "machine0", tmp_path / "machine1"):
        machine.mkdir()
        (machine / "games.py").write_text(GAMES.format(machine.name))
    (tmp_path / "machine0" / "mine.py").write_text("class Say:\n    def on_start(self, run): ...\n")
    ended = two_machines(tmp_path, tmp_path / "whole.toml", option, name)
    (code, errors), (code_of_other, errors_of_other) = ended
    assert code in (2, 3), ended
    assert code_of_other == 2, ended
    assert errors.startswith(f"paw: {problem}")
    assert errors.count("\n") == 1
    file = name.partition(":")[0]
    assert file in errors
    assert file in errors_of_other
