"""Several ranks, one process per device, started by `paw train --gpus N` or torchrun. All between them is here.

What is divided is work, not data: after the rollout every rank holds the rows of the whole update (token ids and
floats), computes advantages, selection and mini-batches of all of them, and runs its share of the micro-batches. So an
update does not depend on the number of ranks, up to the order of sums. Weights, gradients and optimizer state are
sharded by FSDP2; each rank has an engine of its own.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from pydantic_core import to_json
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from paw.errors import UserError
from paw.model.attention import decoder_layers
from paw.model.ranks import PeerLostError, Ranks
from paw.model.watchdog import Watchdog

T = TypeVar("T")
STORE = "PAW_STORE_FD"
"""Variable of rank 0: the open socket for the store, from `paw train --gpus`."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
MEETING = timedelta(minutes=60)
"""For the ranks to find each other."""
FOREVER = timedelta(days=30)
"""A collective call ends when the watchdog says so."""


class DistributedRanks(Ranks):
    """This process among its peers."""

    _mesh: DeviceMesh | None = None
    met = False
    """Whether this process has heard from all others."""

    def __init__(
        self, rank: int, world_size: int, on_host: int, device: torch.device, *, peer_timeout_s: float = 600.0
    ) -> None:
        """Raises UserError where this machine has no device for the rank, or the others cannot be reached."""
        self.rank, self.world_size, self.on_host, self._device = rank, world_size, on_host, device
        if device.type == "cuda":
            local, count = _variable("LOCAL_RANK", rank), torch.cuda.device_count()
            if local >= count:
                raise UserError(f"LOCAL_RANK = {local}, but this machine has {count} GPUs; start one rank a GPU")
            torch.cuda.set_device(local)
            self._device = torch.device("cuda", local)
        loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        if on_host == world_size and loopback:
            for library in ("GLOO", "NCCL"):  # nothing of this machine's ranks concerns the network
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback[0])
        try:
            store, watched = _stores(rank)
            _meet(store, rank, world_size)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=FOREVER)
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(f"rank {rank} cannot reach the others: {str(error).splitlines()[0]}") from None
        self._watchdog = Watchdog(watched, rank, world_size, timeout_s=peer_timeout_s)

    def gather(self, item: T, kind: Any = None) -> list[T]:
        """As JSON, which pydantic turns back. Never a pickle: who speaks for a rank could run code in the others."""
        data = to_json(item, inf_nan_mode="constants")
        return [_adapter(kind or type(item)).validate_json(part) for part in self.gather_bytes(data)]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        parts = self.gather_flat(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [part.numpy().tobytes() for part in parts]

    def gather_rows(self, rows: list[list[T]], kind: type[T]) -> list[list[list[T]]]:
        flat = np.fromiter(chain.from_iterable(rows), np.int32 if kind is int else np.float32)
        lengths = self.gather_flat(torch.tensor([len(row) for row in rows], dtype=torch.int32))
        parts: list[Any] = [part.numpy() for part in self.gather_flat(torch.from_numpy(flat))]
        if kind is int:  # equal ones are one object: 8 bytes a token in a list in place of 36
            shared = np.arange(1 + max((int(part.max()) for part in parts if len(part)), default=0)).astype(object)
        found = []
        for part, its in zip(parts, lengths, strict=True):
            cut = (part[start:end] for start, end in pairwise(accumulate(its.tolist(), initial=0)))
            found.append([(shared.take(row) if kind is int else row).tolist() for row in cut])
        return found

    def gather_flat(self, own: Tensor) -> list[Tensor]:
        """Everybody's [n], each of another length, of one dtype and in host memory: views of one tensor."""
        self._watchdog.wait()
        sizes = torch.empty(self.world_size, 1, dtype=torch.int64)
        dist.all_gather(list(sizes), torch.tensor([len(own)]))
        longest = int(sizes.max())
        padded = own if len(own) == longest else torch.cat([own, own.new_zeros(longest - len(own))])
        whole = own.new_empty(self.world_size, longest)
        if longest:
            dist.all_gather(list(whole), padded)
        return [row[:size] for row, size in zip(whole, sizes.flatten().tolist(), strict=True)]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._watchdog.enter(name)
        yield
        self._watchdog.leave()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._watchdog.wait()
        for part in tensor.view(-1).view(torch.uint8).split(1 << 30):  # gloo knows no int16
            dist.broadcast(part, source)

    def shard(
        self, policy: nn.Module, dtype: torch.dtype, *, offload: bool = False, sharers: int | None = None
    ) -> None:
        """FSDP2: every decoder layer, then the rest (embedding, last norm, head) with `policy` itself.

        `policy` is in host memory; rank 0's parameters replace what the others hold. Only calls of `policy` see
        whole weights. Resharded after every forward, the root as well: between calls `parameters()` are the
        optimizer's. `offload` keeps the shards in host memory. Every `sharers` ranks, which divide their number,
        hold a whole model together (default: all); gradients are summed over these. 1: nothing is sharded.
        """
        if sharers == 1:
            for parameter in policy.parameters():
                self.broadcast(parameter.data, 0)
            if not offload:
                policy.to(self._device)
            return
        self._mesh = self._mesh or self._make_mesh(sharers or self.world_size)
        options: dict[str, Any] = {"mesh": self._mesh}
        if dtype != torch.float32:
            # Inputs keep their dtype: weights of rows and log-probs are float32.
            options["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        source = {name: parameter.data for name, parameter in policy.named_parameters()}
        for layer in decoder_layers(policy):
            fully_shard(layer, **options)
        fully_shard(policy, reshard_after_forward=True, **options)
        for name, parameter in policy.named_parameters():
            assert isinstance(parameter, DTensor)
            value = source.pop(name).to(self._device)
            shard = distribute_tensor(value, parameter.device_mesh, parameter.placements)  # scattered by rank 0
            parameter.to_local().detach().copy_(shard.to_local())

    def _make_mesh(self, sharers: int) -> DeviceMesh:
        """Of all ranks, or [copies, ranks of each]: FSDP replicates over the first, and shards over the second."""
        if sharers == self.world_size:
            return init_device_mesh(self._device.type, (self.world_size,))
        grid = torch.arange(self.world_size).view(-1, sharers)
        groups: Any = [dist.new_subgroups_by_enumeration(of.tolist(), timeout=FOREVER)[0] for of in (grid.T, grid)]
        return DeviceMesh.from_group(groups, self._device.type, mesh=grid, mesh_dim_names=("copy", "rank"))

    def sync_gradients(self, policy: nn.Module, last: bool) -> None:
        if isinstance(policy, FSDPModule):
            policy.set_requires_gradient_sync(last)

    def average_gradients(self, policy: nn.Module) -> None:
        if isinstance(policy, FSDPModule):
            return
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        having = torch.tensor([float(parameter.grad is not None) for parameter in trained])
        dist.all_reduce(having)
        for parameter, ranks in zip(trained, having.tolist(), strict=True):
            if ranks:  # without one anywhere it stays without, as in one rank
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                total = grad.float()
                dist.all_reduce(total)
                parameter.grad = grad.copy_(total / self.world_size)

    def close(self) -> None:
        self._watchdog.close()
        if dist.is_initialized():  # vLLM's end may have taken it along
            dist.destroy_process_group()


_adapter = cache(TypeAdapter)


def _variable(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise UserError(f"{name} = '{value}' in the environment is not a number; start with --gpus or torchrun")
    return int(value)


def read_variables(episodes: int) -> tuple[int, int, int]:
    """torchrun's (rank, ranks, ranks of this machine). UserError where they do not fit, or for an idle rank."""
    rank, world_size = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
    on_host = _variable("LOCAL_WORLD_SIZE", world_size)
    name, value = ("RANK", rank) if not 0 <= rank < world_size else ("LOCAL_WORLD_SIZE", on_host)
    if not (0 <= rank < world_size and 1 <= on_host <= world_size):
        raise UserError(f"{name} = {value} and WORLD_SIZE = {world_size} do not fit; start with --gpus or torchrun")
    if episodes < world_size:
        has = f"rollout.tasks x rollout.group_size = {episodes} episodes"
        raise UserError(f"{has} on {world_size} ranks leaves some without one; lower --gpus")
    return rank, world_size, on_host


def decline(why: str) -> None:
    """Tell the other ranks, which wait for this one, why it does not come. Nothing where they have met."""
    with suppress(UserError, RuntimeError, OSError):
        rank = _variable("RANK", 0)
        if not DistributedRanks.met and (rank or _AGENT_STORE in os.environ):
            store, _ = _stores(rank, timedelta(seconds=30))
            store.set(_start_key(rank), f"rank {rank}: {why}")


def _meet(store: Any, rank: int, world: int) -> None:
    """Wait for all ranks. PeerLostError where one declines."""
    store.set(_start_key(rank), "here")
    words = store.multi_get([_start_key(other) for other in range(world)])
    DistributedRanks.met = True
    for word in words:
        if word != b"here":
            raise PeerLostError(word.decode())


def _start_key(rank: int) -> str:
    return f"paw/start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def _stores(rank: int, timeout: timedelta = MEETING) -> tuple[Any, Any]:
    """Two connections to the store at MASTER_ADDR and MASTER_PORT, which rank 0 opens unless torchrun has.

    torch's own would listen on every interface; this one on MASTER_ADDR's alone where that is of this machine only.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), _variable("MASTER_PORT", 0)
    if not host or not port:
        raise UserError("MASTER_ADDR and MASTER_PORT in the environment name no rank 0; start with --gpus or torchrun")
    opens = rank == 0 and os.environ.get(_AGENT_STORE) != "True"
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    first = options | {"is_master": opens}
    if opens and (listening := os.environ.pop(STORE, None)):
        first["master_listen_fd"] = int(listening)
    elif opens and (host == "localhost" or host.startswith("127.")):
        first["master_listen_fd"] = socket.create_server((host, port)).detach()
    connect: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = connect(host, port, **first)
    return store, connect(host, port, **options)
