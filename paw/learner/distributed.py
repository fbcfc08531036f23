"""Ranks: one process per device, started by `paw train --gpus N` or torchrun. Everything between ranks is here.

What is divided is work, not data: after the rollout every rank holds the rows of the whole update (token ids and
floats), computes advantages, selection and mini-batches of all of them, and runs its share of the micro-batches. So an
update does not depend on the number of ranks, up to the order of sums. Weights, gradients and optimizer state are
sharded by FSDP2; each rank has an engine of its own.
"""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import GradientCheckpointingLayer

from paw.errors import UserError, to_stderr

T = TypeVar("T")
GRACE_S = 3.0
"""Seconds for the others to say why they fail, once a rank has."""
PATIENCE_MIN = 60
"""Minutes a rank waits for the others: their episodes take longer or shorter."""


class Ranks:
    """This process among its peers; without torchrun's variables it is the only one."""

    def __init__(self, device: torch.device, *, tasks: int) -> None:
        """Raises UserError for torchrun variables that do not fit together or this machine, and for idle ranks."""
        self.rank, self.world = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
        self.on_host = _variable("LOCAL_WORLD_SIZE", self.world)
        self._device = device
        if not 0 <= self.rank < self.world:
            raise UserError(
                f"RANK = {self.rank} and WORLD_SIZE = {self.world} do not fit; start with --gpus or torchrun"
            )
        if not 1 <= self.on_host <= self.world:
            raise UserError(
                f"LOCAL_WORLD_SIZE = {self.on_host} and WORLD_SIZE = {self.world} do not fit; start with --gpus or"
                " torchrun"
            )
        if tasks < self.world:
            raise UserError(f"rollout.tasks = {tasks} on {self.world} ranks leaves some without a task; lower --gpus")
        if self.world == 1:
            return
        if device.type == "cuda":
            local, count = _variable("LOCAL_RANK", self.rank), torch.cuda.device_count()
            if local >= count:
                raise UserError(f"LOCAL_RANK = {local}, but this machine has {count} GPUs; start one rank a GPU")
            torch.cuda.set_device(local)
            self._device = torch.device("cuda", local)
        try:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(minutes=PATIENCE_MIN))
        except (ValueError, RuntimeError) as error:
            raise UserError(f"rank {self.rank} cannot reach the others: {str(error).splitlines()[0]}") from None

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
        """What rank 0 makes, while the others wait. Where that raises a UserError, they raise PeerLostError."""
        made, failure = None, None
        if self.first:
            try:
                made = make()
            except UserError as error:
                failure = error
        made, message = self.gather((made, failure and str(failure)))[0]
        if failure:
            raise failure
        if message:
            raise PeerLostError(f"rank 0: {message}")
        return made  # type: ignore[return-value]

    def agree(self, settings: str) -> None:
        """Raise UserError on all ranks where they were not started with the same settings."""
        digests = self.gather(hashlib.sha256(settings.encode()).hexdigest())
        if len(set(digests)) > 1:
            other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            raise UserError(
                f"rank {other} was started with other settings than rank 0: use the same recipe and options"
            )

    def shard(self, policy: nn.Module, dtype: torch.dtype, *, offload: bool = False) -> None:
        """FSDP2: every decoder layer, then the rest (embedding, last norm, head) with `policy` itself.

        `policy` is in host memory, its values rank 0's; what the others hold is replaced. Only calls of `policy` see
        whole weights. Resharded after every forward, the root as well: between calls `parameters()` are the
        optimizer's. `offload` keeps the shards in host memory.
        """
        if self.world == 1:
            return
        options: dict[str, Any] = {"mesh": init_device_mesh(self._device.type, (self.world,))}
        if dtype != torch.float32:
            # Inputs keep their dtype: weights of rows and log-probs are float32.
            options["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        source = {name: parameter.data for name, parameter in policy.named_parameters()}
        for module in policy.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, **options)
        fully_shard(policy, reshard_after_forward=True, **options)
        for name, parameter in policy.named_parameters():
            assert isinstance(parameter, DTensor)
            value = source.pop(name).to(self._device)
            shard = distribute_tensor(value, parameter.device_mesh, parameter.placements)  # scattered by rank 0
            parameter.to_local().detach().copy_(shard.to_local())

    def sync_gradients(self, policy: nn.Module, last: bool) -> None:
        """Whether the next backward pass reduces gradients over ranks, or adds to whole ones kept in each."""
        if isinstance(policy, FSDPModule):
            policy.set_requires_gradient_sync(last)

    def gathered(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Sharded tensors made whole, one at a time, every rank taking part; in host memory on rank 0."""
        for name, tensor in named:
            tensor = whole(tensor.detach())
            yield name, tensor.cpu() if self.first else tensor

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():  # vLLM's end may have taken it along
            dist.destroy_process_group()


class PeerLostError(UserError):
    """Another rank has ended; why, it says itself."""

    exit_code = 3


def lost_peer(error: BaseException) -> bool:
    """Whether a collective call failed because another rank is gone."""
    words = str(error)
    gone = (
        isinstance(error, RuntimeError) and "gloo" in words and ("reset by peer" in words or "closed by peer" in words)
    )
    return gone or isinstance(error, dist.DistBackendError)


def _variable(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise UserError(f"{name} = '{value}' in the environment is not a number; start with --gpus or torchrun")
    return int(value)


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
    is shown what it wrote to standard error, if it failed first. SIGTERM goes on to all, Ctrl-C reaches them anyway.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1
    if not 1 <= count <= available:
        raise UserError(f"--gpus {count}: from 1 to {available} on this machine; see `paw doctor`")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count))}
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
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
        codes: list[int | None] = [None]
        patience = float("inf")
        while None in codes and time.monotonic() < patience:
            time.sleep(0.2)
            codes = [process.poll() for process in ranks]
            if any(codes):  # the others may still find the same mistake, or tell that they lost a peer
                patience = min(patience, time.monotonic() + GRACE_S)
        for process in ranks:
            process.kill()
            process.wait()
        # What the user can mend tells most, then a traceback; a rank that was killed or lost a peer tells little.
        failed = [rank for rank, code in enumerate(codes) if code]
        if not failed:
            return 0
        first = min(failed, key=lambda rank: (codes[rank] != 2, codes[rank] != 1, rank))
        if first:
            logs[first - 1].seek(0)
            for line in logs[first - 1].read().decode(errors="replace").strip().splitlines():
                to_stderr(f"rank {first}: {line}")
        return max(1, codes[first] or 0)
