"""flash-adamw: flashoptim's real kernels, interpreted on the CPU in a process of their own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paw.config import OptimConfig
from paw.errors import UserError
from paw.model.optim import make_optimizer
from paw.recipe import load

WORKER = Path(__file__).with_name("flash_worker.py")


def test_it_is_refused_where_it_cannot_run():
    if torch.cuda.is_available():
        pytest.skip("it can run here")
    with pytest.raises(UserError, match=r"it needs .* or use --optim\.name adamw"):
        make_optimizer([torch.nn.Parameter(torch.zeros(4))], OptimConfig(name="flash-adamw"))


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(UserError, match=r"unknown key 'optim\.offload'; it needs optim\.name = 'flash-adamw'"):
        load("quickstart", {"optim.offload": "true"})
    with pytest.raises(UserError, match=r"it needs model\.dtype = 'bfloat16'"):
        load("quickstart", {"optim.name": "flash-adamw"})


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["offload,resume", "bits,plain,planned"])
def test_on_interpreted_kernels(cases, tmp_path):
    pytest.importorskip("flashoptim")
    child = start(cases, tmp_path, {})
    _, error = child.communicate(timeout=300)
    assert child.returncode == 0, error[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_ranks(world, tmp_path):
    pytest.importorskip("flashoptim")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [start("shards", tmp_path, variables | {"RANK": str(rank)}) for rank in range(world)]
    for rank in ranks:
        _, error = rank.communicate(timeout=300)
        assert rank.returncode == 0, error[-3000:]


def start(cases, folder, variables):
    command = [sys.executable, str(WORKER), cases, str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | variables, **pipes)
