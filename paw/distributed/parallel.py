"""Several ranks, one process per device: how they connect and what they exchange.

`paw train --gpus N` or torchrun starts them.

The ranks divide the rows of an update (token ids and floats). Each rank holds a part of them, and
no rank holds all. All ranks know the rewards of all turns, so every rank computes the same
advantages, selection and mini-batches, and runs micro-batches of the rows that it holds
(`algo.rows`). So an update does not depend on the number of ranks, except for the order of sums.
FSDP2 shards weights, gradients and optimizer state. Each rank has its own engine.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from pydantic_core import to_json
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from paw.distributed.launcher import STORE
from paw.distributed.ranks import PeerLostError, Ranks
from paw.distributed.watchdog import Watchdog
from paw.errors import UserError

T = TypeVar("T")
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
MEETING = timedelta(minutes=60)
"""The time that ranks wait for each other at the start."""
FOREVER = timedelta(days=30)
"""Timeout of collective calls. It is long because the watchdog ends them, not torch."""


class DistributedRanks(Ranks):
    """This process as one of several ranks."""

    _mesh: DeviceMesh | None = None
    met = False
    """Whether this process has connected to all others."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        on_host: int,
        device: torch.device,
        watchdog: Watchdog,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.on_host = on_host
        self._device = device
        self._watchdog = watchdog

    @classmethod
    def join(
        cls,
        rank: int,
        world_size: int,
        on_host: int,
        device: torch.device,
        *,
        peer_timeout_s: float = 600.0,
    ) -> "DistributedRanks":
        """Connect to the other ranks. All ranks must call it.

        Raises UserError if this machine has no device for the rank, or if the others cannot be
        reached.
        """
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            device = _use_own_gpu(rank)
        if on_host == world_size:
            _use_loopback()
        try:
            store, watchdog_store = _stores(rank)
            _meet(store, rank, world_size)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=FOREVER
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(
                f"rank {rank} cannot reach the others: {str(error).splitlines()[0]}"
            ) from None
        watchdog = Watchdog(watchdog_store, rank, world_size, timeout_s=peer_timeout_s)
        return cls(rank, world_size, on_host, device, watchdog)

    def gather(self, item: T, kind: Any = None) -> list[T]:
        """Items are sent as JSON. With pickles, a rank could run code in the others."""
        item_bytes = to_json(item, inf_nan_mode="constants", fallback=np.ndarray.tolist)
        adapter = _adapter(kind or type(item))
        return [adapter.validate_json(rank_bytes) for rank_bytes in self.gather_bytes(item_bytes)]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        rank_tensors = self.gather_flat(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [rank_bytes.numpy().tobytes() for rank_bytes in rank_tensors]

    def gather_rows(
        self, rows: list[np.ndarray], kind: type[int | float]
    ) -> list[list[np.ndarray]]:
        dtype = np.int32 if kind is int else np.float32
        own_values = np.concatenate([np.empty(0, dtype), *rows]).astype(dtype, copy=False)
        lengths = self.gather_flat(torch.tensor([len(row) for row in rows], dtype=torch.int32))
        values = [
            rank_values.numpy() for rank_values in self.gather_flat(torch.from_numpy(own_values))
        ]
        gathered: list[list[np.ndarray]] = []
        for rank_values, part_lengths in zip(values, lengths, strict=True):
            bounds = accumulate(part_lengths.tolist(), initial=0)
            gathered.append(
                [rank_values[row_start:row_end] for row_start, row_end in pairwise(bounds)]
            )
        return gathered

    def gather_flat(self, values: Tensor) -> list[Tensor]:
        """Return the `values` [n] of all ranks, in rank order, as views of one tensor.

        Lengths may differ between ranks. All values have the same dtype and are in host memory.
        """
        self._watchdog.note_wait()
        lengths = torch.empty(self.world_size, 1, dtype=torch.int64)
        dist.all_gather(list(lengths), torch.tensor([len(values)]))
        longest = int(lengths.max())
        padded = values
        if len(values) < longest:
            padded = torch.cat([values, values.new_zeros(longest - len(values))])
        gathered = values.new_empty(self.world_size, longest)
        if longest:
            dist.all_gather(list(gathered), padded)
        return [
            row[:length] for row, length in zip(gathered, lengths.flatten().tolist(), strict=True)
        ]

    def gather_array(self, array: np.ndarray) -> list[np.ndarray]:
        rank_tensors = self.gather_flat(torch.from_numpy(np.ascontiguousarray(array)))
        return [rank_tensor.numpy() for rank_tensor in rank_tensors]

    def exchange_arrays(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        received = self.exchange_flat([torch.from_numpy(part) for part in parts])
        return [part.numpy() for part in received]

    def exchange_flat(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send `parts[r]` [n] to rank r. Returns what each rank has sent, as views of one tensor.

        All tensors are in host memory and have the same dtype.
        """
        self._watchdog.note_wait()
        sent = torch.tensor([len(part) for part in parts])
        lengths = torch.empty(self.world_size, dtype=torch.int64)
        dist.all_to_all_single(lengths, sent)
        outgoing = torch.cat(list(parts))
        incoming = outgoing.new_empty(int(lengths.sum()))
        dist.all_to_all_single(incoming, outgoing, lengths.tolist(), sent.tolist())
        return list(incoming.split(lengths.tolist()))

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        self._watchdog.enter(name)
        yield
        self._watchdog.leave()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._watchdog.note_wait()
        as_bytes = tensor.view(-1).view(torch.uint8)  # gloo has no int16
        for byte_block in as_bytes.split(1 << 30):
            dist.broadcast(byte_block, source)

    def shard(
        self,
        policy: nn.Module,
        dtype: torch.dtype,
        *,
        layers: Sequence[nn.Module],
        offload: bool = False,
        sharers: int | None = None,
    ) -> None:
        """Shard `policy` with FSDP2: each of its `layers`, then the rest with `policy` itself.

        The rest is the embedding, the last norm and the head.

        `policy` is in host memory. Rank 0's parameters replace those of the other ranks. The layers
        are resharded after their forward pass, and gathered again in the backward pass. The rest is
        gathered once for both passes, because the head's weight is read at the end of the first and
        the beginning of the second. It is resharded at the end of the backward pass or, without a
        gradient, of the forward pass. After that, `parameters()` are the shards that the optimizer
        updates.

        With `offload`, the shards stay in host memory. `sharers` is the number of ranks that
        together hold one full model. It divides the world size (default: all ranks). Gradients are
        summed over the copies. With `sharers` 1, nothing is sharded.
        """
        if sharers == 1:
            for parameter in policy.parameters():
                self.broadcast(parameter.data, 0)
            if not offload:
                policy.to(self._device)
            return
        options = self._fsdp_options(dtype, offload=offload, sharers=sharers or self.world_size)
        full_values = {name: parameter.data for name, parameter in policy.named_parameters()}
        for layer in layers:
            fully_shard(layer, **options)
        fully_shard(policy, reshard_after_forward=False, **options)
        policy.register_forward_hook(_reshard_without_gradient)

        for name, parameter in policy.named_parameters():
            assert isinstance(parameter, DTensor)
            value = full_values.pop(name).to(self._device)
            # Rank 0 scatters its own values.
            shard = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.to_local().detach().copy_(shard.to_local())

    def _fsdp_options(self, dtype: torch.dtype, *, offload: bool, sharers: int) -> dict[str, Any]:
        """Return the keyword arguments of `fully_shard`."""
        if self._mesh is None:
            self._mesh = self._make_mesh(sharers)
        options: dict[str, Any] = {"mesh": self._mesh}
        if dtype != torch.float32:
            # Inputs keep their dtype, because the weights of rows and the log-probs are float32.
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        return options

    def _make_mesh(self, sharers: int) -> DeviceMesh:
        """Make a mesh [ranks], or [copies, ranks of a copy] if FSDP shards several copies."""
        if sharers == self.world_size:
            return init_device_mesh(self._device.type, (self.world_size,))
        grid = torch.arange(self.world_size).view(-1, sharers)
        copies, _ = dist.new_subgroups_by_enumeration(grid.T.tolist(), timeout=FOREVER)
        shards, _ = dist.new_subgroups_by_enumeration(grid.tolist(), timeout=FOREVER)
        groups: Any = [copies, shards]
        return DeviceMesh.from_group(
            groups, self._device.type, mesh=grid, mesh_dim_names=("copy", "rank")
        )

    def reshard(self, policy: nn.Module) -> None:
        if isinstance(policy, FSDPModule):
            policy.reshard()

    def sync_gradients(self, policy: nn.Module, last: bool) -> None:
        if isinstance(policy, FSDPModule):
            policy.set_requires_gradient_sync(last)

    def average_gradients(self, policy: nn.Module) -> None:
        if isinstance(policy, FSDPModule):
            return
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        has_gradient = [float(parameter.grad is not None) for parameter in trained]
        ranks_with_gradient = torch.tensor(has_gradient)
        dist.all_reduce(ranks_with_gradient)
        for parameter, rank_count in zip(trained, ranks_with_gradient.tolist(), strict=True):
            if rank_count == 0:  # if no rank has a gradient, it keeps none, as with one rank
                continue
            grad = parameter.grad
            if grad is None:
                grad = torch.zeros_like(parameter)
            gradient_sum = grad.float()
            dist.all_reduce(gradient_sum)
            parameter.grad = grad.copy_(gradient_sum / self.world_size)

    def close(self) -> None:
        self._watchdog.close()
        if dist.is_initialized():  # vLLM may have destroyed it when it shut down
            dist.destroy_process_group()


def _reshard_without_gradient(policy: nn.Module, args: Any, output: Any) -> None:
    """Reshard the root of an FSDP model after a forward pass that no backward pass follows."""
    if not torch.is_grad_enabled():
        cast(FSDPModule, policy).reshard()


_adapter = cache(TypeAdapter)


def _use_own_gpu(rank: int) -> torch.device:
    """Make this rank's GPU the current device and return it.

    Raises UserError if the machine has fewer GPUs than ranks.
    """
    local_rank = _variable("LOCAL_RANK", rank)
    gpu_count = torch.cuda.device_count()
    if local_rank >= gpu_count:
        raise UserError(
            f"LOCAL_RANK = {local_rank}, but this machine has {gpu_count} GPUs; "
            "start one rank per GPU"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _use_loopback() -> None:
    """Make collective libraries use the loopback interface. One machine needs no network."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback[0])


def _variable(name: str, default: int) -> int:
    """Return the number in an environment variable. Raises UserError if it is not a number."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise UserError(
            f"{name} = '{value}' in the environment is not a number; start with --gpus or torchrun"
        )
    return int(value)


def read_variables() -> tuple[int, int, int]:
    """Return torchrun's (rank, number of ranks, ranks on this machine).

    Raises UserError if they contradict each other.
    """
    rank = _variable("RANK", 0)
    world_size = _variable("WORLD_SIZE", 1)
    on_host = _variable("LOCAL_WORLD_SIZE", world_size)
    for name, value, in_range in (
        ("RANK", rank, 0 <= rank < world_size),
        ("LOCAL_WORLD_SIZE", on_host, 1 <= on_host <= world_size),
    ):
        if not in_range:
            raise UserError(
                f"{name} = {value} and WORLD_SIZE = {world_size} do not match; "
                "start with --gpus or torchrun"
            )
    return rank, world_size, on_host


def decline(reason: str) -> None:
    """Tell the ranks that are waiting for this one why it will not connect.

    Does nothing once the ranks are connected.
    """
    with suppress(UserError, RuntimeError, OSError):
        rank = _variable("RANK", 0)
        store_is_open = rank > 0 or _AGENT_STORE in os.environ
        if store_is_open and not DistributedRanks.met:
            store, _ = _stores(rank, timeout=timedelta(seconds=30))
            store.set(_start_key(rank), f"rank {rank}: {reason}")


def _meet(store: Any, rank: int, world_size: int) -> None:
    """Wait for all ranks. Raises PeerLostError if one declines."""
    store.set(_start_key(rank), "here")
    answers = store.multi_get([_start_key(other_rank) for other_rank in range(world_size)])
    DistributedRanks.met = True
    for answer in answers:
        if answer != b"here":
            raise PeerLostError(answer.decode())


def _start_key(rank: int) -> str:
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"paw/start/{restarts}/{rank}"


def _stores(rank: int, timeout: timedelta = MEETING) -> tuple[Any, Any]:
    """Return two connections to the store at MASTER_ADDR and MASTER_PORT, one for the watchdog.

    Rank 0 opens the store, unless torchrun has done so. A store that torch opens listens on every
    interface. This one listens only on MASTER_ADDR if that is loopback.
    """
    host = os.environ.get("MASTER_ADDR", "")
    port = _variable("MASTER_PORT", 0)
    if not host or not port:
        raise UserError(
            "MASTER_ADDR and MASTER_PORT in the environment do not lead to rank 0; "
            "start with --gpus or torchrun"
        )
    is_master = rank == 0 and os.environ.get(_AGENT_STORE) != "True"
    listening: dict[str, Any] = {}
    if is_master:
        descriptor = os.environ.pop(STORE, None)
        if descriptor:
            listening["master_listen_fd"] = int(descriptor)
        elif host == "localhost" or host.startswith("127."):
            listening["master_listen_fd"] = socket.create_server((host, port)).detach()
    connect: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = connect(
        host, port, is_master=is_master, timeout=timeout, wait_for_workers=False, **listening
    )
    watchdog_store = connect(host, port, timeout=timeout, wait_for_workers=False)
    return store, watchdog_store
