"""flash-adamw: flashoptim's real kernels, interpreted on the CPU in a process of their own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paw.config.recipe import load
from paw.config.sections import OptimConfig
from paw.errors import UserError
from paw.model.optim import make_optimizer

WORKER = Path(__file__).with_name("flash_worker.py")


def test_it_is_refused_where_it_cannot_run():
    if torch.cuda.is_available():
        pytest.skip("it can run here")
    with pytest.raises(UserError, match=r"it needs .* or use --optim\.name adamw"):
        make_optimizer([torch.nn.Parameter(torch.zeros(4))], OptimConfig(name="flash-adamw"))


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(
        UserError, match=r"unknown key 'optim\.offload'; it needs optim\.name = 'flash-adamw'"
    ):
        load("quickstart", {"optim.offload": "true"})
    with pytest.raises(UserError, match=r"it needs model\.dtype = 'bfloat16'"):
        load("quickstart", {"optim.name": "flash-adamw"})


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["resume,bits,plain,planned"])
def test_on_interpreted_kernels(cases, tmp_path):
    run(cases, tmp_path, [{}])


@pytest.mark.slow
def test_ranks(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
        }
    run("shards", tmp_path, [where | {"RANK": str(rank)} for rank in range(2)])


def run(cases, folder, ranks):
    """The worker, in a process for each of `ranks`: their variables."""
    pytest.importorskip("flashoptim")
    command = [sys.executable, str(WORKER), cases, str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, env=environment | variables, **pipes) for variables in ranks
    ]
    for child in started:
        _, error = child.communicate(timeout=300)
        assert child.returncode == 0, error[-3000:]
