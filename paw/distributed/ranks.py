"""The ranks of a run, for a run of a single process.

`paw.distributed.parallel` has the version with several processes, one per device.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from paw.errors import UserError

T = TypeVar("T")


class Ranks:
    """The only rank.

    Every method that exchanges data with other ranks returns this rank's own data.
    """

    rank = 0
    world_size = 1
    on_host = 1
    """Number of ranks on this machine."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def gather(self, item: T, kind: Any = None) -> list[T]:
        """Return the items of all ranks, in rank order.

        `kind` is their type if `type(item)` is not specific enough.
        """
        return [item]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in rank order."""
        return [data]

    def gather_results(
        self, make: Callable[[], T], kind: Any = None, refusal: type[UserError] | None = None
    ) -> list[T]:
        """Call `make` on every rank and return the results of all, in rank order.

        `kind` is the type of a result. If `make` raises UserError on some rank, that rank raises it
        and the others raise PeerLostError. `refusal` is an error class: if `make` raises it on some
        rank, all ranks raise the error of the lowest such rank.
        """
        result = None
        failure: UserError | None = None
        own_message = None
        caught = refusal or UserError
        try:
            result = make()
        except caught as error:
            failure = error
            own_message = str(error)
        result_kind = Any
        if kind:
            result_kind = kind | None
        gathered = self.gather((result, own_message), tuple[result_kind, str | None])
        if failure and not refusal:
            raise failure
        for rank, (_, message) in enumerate(gathered):
            if message and refusal:
                raise refusal(f"rank {rank}: {message}" if rank else message)
            if message:
                raise PeerLostError(f"rank {rank}: {message}")
        return [result for result, _ in gathered]  # type: ignore[misc]

    def gather_rows(
        self, rows: list[np.ndarray], kind: type[int | float]
    ) -> list[list[np.ndarray]]:
        """Return all ranks' rows [n], in rank order: float (sent as float32) or int (as int32)."""
        return [rows]

    def gather_array(self, array: np.ndarray) -> list[np.ndarray]:
        """Return the arrays [n] of all ranks, in rank order. They have the same dtype."""
        return [array]

    def exchange_arrays(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Send `parts[r]` to rank r. Returns what each rank has sent, in rank order.

        All arrays are [n], of the same dtype on all ranks.
        """
        return list(parts)

    def broadcast_from_rank0(
        self, make: Callable[[], T], kind: Any = None, refusal: type[UserError] | None = None
    ) -> T:
        """Call `make` on rank 0 alone and return its result on all ranks.

        Errors as in `gather_results`.
        """
        results: Any = self.gather_results(lambda: make() if self.first else None, kind, refusal)
        return results[0]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill a tensor in host memory with the values of rank `source`."""

    def run_on_all(self, make: Callable[[], T]) -> T:
        """Call `make` on every rank. Each keeps its own result, which is not sent.

        Errors as in `gather_results`.
        """
        results: list[T] = []
        self.gather_results(lambda: results.append(make()))
        return results[0]

    def check_agreement(self, text: str, message: str) -> None:
        """Raise UserError on all ranks if the `text` of some rank differs from rank 0's.

        {} in the `message` stands for the number of that rank.
        """
        digests = self.gather(hashlib.sha256(text.encode()).hexdigest())
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise UserError(message.replace("{}", str(rank)))

    def in_phase(self, name: str) -> AbstractContextManager[None]:
        """Tell the watchdog which phase this rank is in during the block.

        The watchdog learns from this how long each phase may take.
        """
        return nullcontext()

    def shard(
        self,
        policy: nn.Module,
        dtype: torch.dtype,
        *,
        layers: Sequence[nn.Module],
        offload: bool = False,
        sharers: int | None = None,
    ) -> None:
        """Shard the parameters of `policy` over the ranks, see `parallel.DistributedRanks`."""

    def reshard(self, policy: nn.Module) -> None:
        """Reshard after a forward pass with gradients that no backward pass will follow."""

    def sync_gradients(self, policy: nn.Module, last: bool) -> None:
        """Set whether the next backward pass reduces gradients over the ranks.

        If not, the pass adds to full gradients on each rank.
        """

    def average_gradients(self, policy: nn.Module) -> None:
        """Average a mini-batch's gradients in float32 if every rank holds the full model.

        FSDP does its own averaging.
        """

    def close(self) -> None:
        """Leave the other ranks."""


class PeerLostError(UserError):
    """Another rank has ended. That rank prints the reason."""

    exit_code = 3


def lost_peer(error: BaseException) -> bool:
    """Whether a collective call failed because another rank is gone."""
    message = str(error)
    closed_by_peer = isinstance(error, RuntimeError) and "gloo" in message and "by peer" in message
    return closed_by_peer or isinstance(error, torch.distributed.DistBackendError)


def out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # vLLM's allocator raises a RuntimeError.
    phrases = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a shard (a collective call), or any other tensor unchanged."""
    if hasattr(tensor, "full_tensor"):
        return cast(Any, tensor).full_tensor()
    return tensor


def local_row_range(tensor: Tensor) -> tuple[int, int] | None:
    """Return [start, end) of this rank's rows of a sharded tensor; None if it is not sharded."""
    for dim, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard():
            mesh = cast(Any, tensor).device_mesh
            rows_per_rank = -(-len(tensor) // mesh.size(dim))  # rounded up
            first_row = min(rows_per_rank * mesh.get_local_rank(dim), len(tensor))
            end_row = min(first_row + rows_per_rank, len(tensor))
            return first_row, end_row
    return None


def in_first_replica(tensor: Tensor) -> bool:
    """Whether this rank is the first of the ranks with the same rows of a sharded tensor."""
    for dim, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_replicate() and cast(Any, tensor).device_mesh.get_local_rank(dim) != 0:
            return False
    return True


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor. Other tensors are returned unchanged."""
    if hasattr(tensor, "placements"):
        return cast(Any, tensor).to_local()
    return tensor


def rows_like(like: Tensor, named: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the rows of the full tensor `named[name]` that this rank holds of `like`.

    If `named` has a method `rows(name, start, end)`, only those rows are read.
    """
    row_range = local_row_range(like)
    if row_range is None:
        return named[name]
    first_row, end_row = row_range
    if hasattr(named, "rows"):
        return cast(Any, named).rows(name, first_row, end_row)
    return named[name][first_row:end_row]


def shard_like(like: Tensor, rows: Tensor) -> Tensor:
    """Copy `rows` to the device of `like`, as a tensor that is sharded like `like`.

    `rows` are this rank's rows of a tensor that has as many rows as `like`; the other dimensions
    may differ.
    """
    rows = rows.to(like.device, copy=True)
    if not hasattr(like, "placements"):
        return rows
    from torch.distributed.tensor import DTensor  # slow to import, and one process does not need it

    shape = torch.Size([len(like), *rows.shape[1:]])
    return DTensor.from_local(
        rows,
        device_mesh=cast(Any, like).device_mesh,
        placements=cast(Any, like).placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
