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
    with pytest.raises(UserError, match=r"needs .* use --optim\.name adamw$"):
        make_optimizer([torch.nn.Parameter(torch.zeros(4))], OptimConfig(name="flash-adamw"))


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(
        UserError, match=r"unknown key 'optim\.offload'; it needs optim\.name = 'flash-adamw'"
    ):
        load("quickstart", {"optim.offload": "true"})
    with pytest.raises(UserError, match=r"it needs model\.dtype = 'bfloat16'"):
        load("quickstart", {"optim.name": "flash-adamw"})


@pytest.mark.long
@pytest.mark.slow
def test_on_interpreted_kernels(tmp_path):
    """Runs all cases of the worker, those of two ranks included."""
    pytest.importorskip("flashoptim")
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    finished = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path), str(port)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
