"""Ranks: one process per device, started by `paw train --gpus N` or torchrun. Everything between ranks is here.

What is divided is work, not data: after the rollout every rank holds the rows of the whole update (token ids and
floats), computes advantages, selection and mini-batches of all of them, and runs its share of the micro-batches. So an
update does not depend on the number of ranks, up to the order of sums. Weights, gradients and optimizer state are
sharded by FSDP2; each rank has an engine of its own.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import GradientCheckpointingLayer

from paw.errors import UserError, to_stderr

T = TypeVar("T")
GRACE_S = 3.0
"""Seconds for rank 0 to say why it fails, once another rank has."""


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
        if self.world > 1 and dist.is_initialized():  # vLLM's end may have taken it along
            dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, a collective call; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(like: Tensor, tensor: Tensor) -> Tensor:
    """A copy of a full tensor on `like`'s device, sharded as `like` is."""
    tensor = tensor.to(like.device, copy=True)
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def leave() -> None:
    """End a rank that has done its work: one interpreter exit in about twenty aborts in a thread of gloo's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def launch(count: int, arguments: list[str]) -> int:
    """Run `paw <arguments>` in `count` processes on this machine; the exit code of one that failed, else 0.

    When one fails the others are stopped: what they wait for will not come. The terminal is rank 0's; of another rank
    is shown what it wrote to standard error, if it failed alone. SIGTERM goes on to all, Ctrl-C reaches them anyway.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1
    if not 1 <= count <= available:
        raise UserError(f"--gpus {count}: from 1 to {available} on this machine; see `paw doctor`")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1, count)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "paw", *arguments],
                env=threads | os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log and subprocess.DEVNULL,
                stderr=log,
            )
            for rank, log in enumerate([None, *logs])
        ]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
        while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
            time.sleep(0.2)
        if any(rank.returncode for rank in ranks):
            with suppress(subprocess.TimeoutExpired):  # its own message is the clearest
                ranks[0].wait(GRACE_S)
        failed = {rank: process.returncode for rank, process in enumerate(ranks) if process.returncode}
        for process in ranks:
            process.kill()
            process.wait()
        if not failed:
            return 0
        first = min(failed)
        if first:
            logs[first - 1].seek(0)
            to_stderr(f"rank {first}: " + logs[first - 1].read().decode(errors="replace").strip())
        return failed[first] if failed[first] > 0 else 1
