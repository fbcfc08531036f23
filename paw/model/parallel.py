"""Ranks: one process per device, started by `paw train --gpus N` or torchrun. Everything between ranks is here.

What is divided is work, not data: after the rollout every rank holds the rows of the whole update (token ids and
floats), computes advantages, selection and mini-batches of all of them, and runs its share of the micro-batches. So an
update does not depend on the number of ranks, up to the order of sums. Weights, gradients and optimizer state are
sharded by FSDP2; each rank has an engine of its own.
"""

import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from pydantic_core import to_json
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import GradientCheckpointingLayer

from paw.errors import UserError

T = TypeVar("T")
STORE = "PAW_STORE_FD"
"""Variable of rank 0: the open socket for the store, from `paw train --gpus`."""
MEETING = timedelta(minutes=60)
"""For the ranks to find each other."""
FOREVER = timedelta(days=30)
"""A collective call ends when the watchdog says so."""


class Ranks:
    """This process among its peers; without torchrun's variables it is the only one."""

    _watchdog: Any = None

    def __init__(self, device: torch.device, *, tasks: int, peer_timeout_s: float = 600.0) -> None:
        """Raises UserError for torchrun variables that do not fit together or this machine, and for idle ranks."""
        self.rank, self.world_size = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
        self.on_host = _variable("LOCAL_WORLD_SIZE", self.world_size)
        self._device = device
        if not 0 <= self.rank < self.world_size:
            raise UserError(
                f"RANK = {self.rank} and WORLD_SIZE = {self.world_size} do not fit; start with --gpus or torchrun"
            )
        if not 1 <= self.on_host <= self.world_size:
            raise UserError(
                f"LOCAL_WORLD_SIZE = {self.on_host} and WORLD_SIZE = {self.world_size} do not fit; start with --gpus or"
                " torchrun"
            )
        if tasks < self.world_size:
            raise UserError(
                f"rollout.tasks = {tasks} on {self.world_size} ranks leaves some without a task; lower --gpus"
            )
        if self.world_size == 1:
            return
        if device.type == "cuda":
            local, count = _variable("LOCAL_RANK", self.rank), torch.cuda.device_count()
            if local >= count:
                raise UserError(f"LOCAL_RANK = {local}, but this machine has {count} GPUs; start one rank a GPU")
            torch.cuda.set_device(local)
            self._device = torch.device("cuda", local)
        if self.on_host == self.world_size and (
            loopback := [n for _, n in socket.if_nameindex() if n.startswith("lo")]
        ):
            for library in ("GLOO", "NCCL"):  # nothing of this machine's ranks concerns the network
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback[0])
        try:
            store, watched = _stores(self.rank, self.world_size)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=FOREVER)
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(f"rank {self.rank} cannot reach the others: {str(error).splitlines()[0]}") from None
        from paw.model.watchdog import Watchdog

        self._watchdog = Watchdog(watched, self.rank, self.world_size, timeout_s=peer_timeout_s)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and the terminal."""
        return self.rank == 0

    def gather(self, item: T, kind: Any = None) -> list[T]:
        """Everybody's item, in the order of ranks; as JSON, which pydantic turns back into `kind` (default: its type).

        Never a pickle: whoever could speak for a rank could run code in the others.
        """
        if self.world_size == 1:
            return [item]
        data = to_json(item, inf_nan_mode="constants")
        return [_adapter(kind or type(item)).validate_json(part) for part in self.gather_bytes(data)]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, in the order of ranks."""
        if self.world_size == 1:
            return [data]
        if self._watchdog:
            self._watchdog.wait()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = int(max(sizes))
        padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(parts, padded)
        return [part.numpy().tobytes()[: int(size)] for part, size in zip(parts, sizes, strict=True)]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the watchdog of the other ranks may take to last."""
        if self._watchdog:
            self._watchdog.enter(name)
        yield
        if self._watchdog:
            self._watchdog.leave()

    def broadcast_from_rank0(self, make: Callable[[], T], kind: Any = None) -> T:
        """What rank 0 makes, of type `kind`, while the others wait. Where that raises a UserError, they raise
        PeerLostError."""
        made, failure = None, None
        if self.first:
            try:
                made = make()
            except UserError as error:
                failure = error
        if self.world_size > 1:
            made, message = self.gather((made, failure and str(failure)), tuple[kind or Any, str | None])[0]
            if message and not self.first:
                raise PeerLostError(f"rank 0: {message}")
        if failure:
            raise failure
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
        if self.world_size == 1:
            return
        options: dict[str, Any] = {"mesh": init_device_mesh(self._device.type, (self.world_size,))}
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
            tensor = full_tensor(tensor.detach())
            yield name, tensor.cpu() if self.first else tensor

    def close(self) -> None:
        if self._watchdog:
            self._watchdog.close()
        if self.world_size > 1 and dist.is_initialized():  # vLLM's end may have taken it along
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


_adapter = cache(TypeAdapter)


def _variable(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise UserError(f"{name} = '{value}' in the environment is not a number; start with --gpus or torchrun")
    return int(value)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, a collective call; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distribute_like(like: Tensor, tensor: Tensor) -> Tensor:
    """A copy of a full tensor on `like`'s device, sharded as `like` is."""
    tensor = tensor.to(like.device, copy=True)
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def exit_now() -> NoReturn:
    """End a process without the interpreter's own way, which in one of twenty aborts in a thread of gloo's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _stores(rank: int, world: int) -> tuple[Any, Any]:
    """Two connections to the store at MASTER_ADDR and MASTER_PORT, which rank 0 opens unless torchrun has.

    torch's own would listen on every interface; this one on MASTER_ADDR's alone where that is of this machine only.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), _variable("MASTER_PORT", 0)
    if not host or not port:
        raise UserError("MASTER_ADDR and MASTER_PORT in the environment name no rank 0; start with --gpus or torchrun")
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options: dict[str, Any] = {}
    if opens and (listening := os.environ.pop(STORE, None)):
        options["master_listen_fd"] = int(listening)
    elif opens and (host == "localhost" or host.startswith("127.")):
        options["master_listen_fd"] = socket.create_server((host, port)).detach()
    connect: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = connect(host, port, world, opens, timeout=MEETING, **options)
    return store, connect(host, port, is_master=False, timeout=MEETING, wait_for_workers=False)
