"""Ranks: one process per device, started by `paw train --gpus N` or torchrun. Everything between ranks is here.

What is divided is work, not data: after the rollout every rank holds the rows of the whole update (token ids and
floats), computes advantages, selection and mini-batches of all of them, and runs its share of the micro-batches. So an
update does not depend on the number of ranks, up to the order of sums. Weights, gradients and optimizer state are
sharded by FSDP2; each rank has an engine of its own.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import GradientCheckpointingLayer

from paw.errors import UserError

T = TypeVar("T")


class Ranks:
    """This process among its peers; without torchrun's variables it is the only one."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._device = device
        if self.world > 1:
            if device.type == "cuda":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", self.rank)))
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and the terminal."""
        return self.rank == 0

    def gather(self, item: T) -> list[T]:
        """Everybody's item, in the order of ranks."""
        if self.world == 1:
            return [item]
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item)
        return items

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, while the others wait."""
        return self.gather(make() if self.first else None)[0]  # type: ignore[return-value]

    def shard(self, policy: nn.Module, dtype: torch.dtype) -> None:
        """FSDP2: every decoder layer, then the rest (embedding, last norm, head) with `policy` itself.

        Only calls of `policy` see whole weights. Resharded after every forward, the root as well: between calls
        `parameters()` are the optimizer's.
        """
        if self.world == 1:
            return
        options: dict[str, Any] = {"mesh": init_device_mesh(self._device.type, (self.world,))}
        if dtype != torch.float32:
            # Inputs keep their dtype: weights of rows and log-probs are float32.
            options["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for module in policy.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, **options)
        fully_shard(policy, reshard_after_forward=True, **options)

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, a collective call; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(like: Tensor, tensor: Tensor) -> Tensor:
    """A copy of a full tensor on `like`'s device, sharded as `like` is."""
    tensor = tensor.to(like.device, copy=True)
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def launch(count: int, arguments: list[str]) -> int:
    """Run `paw <arguments>` in `count` processes on this machine; the exit code of the first that fails, else 0.

    When one fails the others are stopped: what they wait for will not come.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else count
    if count > available:
        raise UserError(f"--gpus {count}: torch sees {available}; see `paw doctor`")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "paw", *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    try:
        while (codes := [process.poll() for process in processes]).count(None):
            if failed := [code for code in codes if code]:
                return failed[0]
            time.sleep(0.2)
        return next((code for code in codes if code), 0)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()
