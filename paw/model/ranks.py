"""The processes of a run: here the only one; `paw.model.parallel` has several, one a device."""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from paw.errors import UserError

T = TypeVar("T")


class Ranks:
    """This process among its peers, of which there are none."""

    rank, world_size, on_host = 0, 1, 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and the terminal."""
        return self.rank == 0

    def gather(self, item: T, kind: Any = None) -> list[T]:
        """Everybody's item, in the order of ranks; `kind` is its type where `type(item)` does not say all."""
        return [item]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def together(self, make: Callable[[], T], kind: Any = None, refusal: type[UserError] | None = None) -> list[T]:
        """What each rank makes, of type `kind`, in the order of ranks. Where that raises a UserError on any of them,
        the others raise PeerLostError; where it raises a `refusal`, all raise that of the first such rank."""
        made, failure, caught = None, None, refusal or UserError
        try:
            made = make()
        except caught as error:
            failure = error
        found = self.gather((made, failure and str(failure)), tuple[kind | None if kind else Any, str | None])
        if failure and not refusal:
            raise failure
        for rank, (_, message) in enumerate(found):
            if message and refusal:
                raise refusal(f"rank {rank}: {message}" if rank else message)
            if message:
                raise PeerLostError(f"rank {rank}: {message}")
        return [made for made, _ in found]  # type: ignore[misc]

    def gather_rows(self, rows: list[list[T]], kind: type[T]) -> list[list[list[T]]]:
        """Everybody's rows of float (as float32) or of int (0 to 2^31 - 1), in the order of ranks."""
        return [rows]

    def gather_numbered(self, rows: dict[int, list[float]]) -> list[list[float]]:
        """The rows 0 to n - 1, each of which one rank has (as float32)."""
        numbers, values = self.gather(list(rows), list[int]), self.gather_rows(list(rows.values()), float)
        found = {i: row for its, of in zip(numbers, values, strict=True) for i, row in zip(its, of, strict=True)}
        return [found[i] for i in range(len(found))]

    def broadcast_from_rank0(
        self, make: Callable[[], T], kind: Any = None, refusal: type[UserError] | None = None
    ) -> T:
        """What rank 0 makes, of type `kind`, while the others wait; see `together`."""
        made: Any = self.together(lambda: make() if self.first else None, kind, refusal)
        return made[0]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill a tensor in host memory with that of the rank `source`."""

    def everywhere(self, make: Callable[[], T]) -> T:
        """What this rank makes with what its machine has, see `together`."""
        made: list[T] = []
        self.together(lambda: made.append(make()))
        return made[0]

    def agree(self, text: str, otherwise: str) -> None:
        """Raise UserError on all ranks where one has another text than rank 0: `otherwise`, with that rank for {}."""
        digests = self.gather(hashlib.sha256(text.encode()).hexdigest())
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise UserError(otherwise.replace("{}", str(rank)))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """What the watchdog of the other ranks may take to last."""
        return nullcontext()

    def shard(
        self, policy: nn.Module, dtype: torch.dtype, *, offload: bool = False, sharers: int | None = None
    ) -> None:
        """Divide the parameters of `policy` among the ranks; see `parallel.DistributedRanks`."""

    def sync_gradients(self, policy: nn.Module, last: bool) -> None:
        """Whether the next backward pass reduces gradients over ranks, or adds to whole ones kept in each."""

    def average_gradients(self, policy: nn.Module) -> None:
        """Of a mini-batch, where every rank holds the whole model: in float32. FSDP averages by itself."""

    def close(self) -> None:
        """Leave the others."""


class PeerLostError(UserError):
    """Another rank has ended; why, it says itself."""

    exit_code = 3


def lost_peer(error: BaseException) -> bool:
    """Whether a collective call failed because another rank is gone."""
    words = str(error)
    gone = isinstance(error, RuntimeError) and "gloo" in words and "by peer" in words
    return gone or isinstance(error, torch.distributed.DistBackendError)


def out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left; vLLM's allocator says so by a RuntimeError."""
    words = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    told = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return told or isinstance(error, torch.OutOfMemoryError | MemoryError)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, a collective call; any other tensor as it is."""
    whole = getattr(tensor, "full_tensor", None)
    return whole() if whole else tensor


def held_rows(tensor: Tensor) -> tuple[int, int] | None:
    """(First, end) of the rows that this rank has of a sharded tensor; None for one that is whole."""
    for dim, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard():
            mesh = cast(Any, tensor).device_mesh
            each = -(-len(tensor) // mesh.size(dim))
            first = min(each * mesh.get_local_rank(dim), len(tensor))
            return first, min(first + each, len(tensor))
    return None


def in_first_replica(tensor: Tensor) -> bool:
    """Whether this rank is the first of those that have the same rows of a sharded tensor."""
    placed = enumerate(getattr(tensor, "placements", ()))
    return all(cast(Any, tensor).device_mesh.get_local_rank(dim) == 0 for dim, of in placed if of.is_replicate())


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor; any other as it is."""
    return cast(Any, tensor).to_local() if hasattr(tensor, "placements") else tensor


def rows_like(like: Tensor, named: Mapping[str, Tensor], name: str) -> Tensor:
    """Of the whole tensor `named[name]` the rows that this rank has of `like`; where it has `rows`, no more is read."""
    rows = held_rows(like)
    if rows is None:
        return named[name]
    return cast(Any, named).rows(name, *rows) if hasattr(named, "rows") else named[name][slice(*rows)]


def shard_like(like: Tensor, rows: Tensor) -> Tensor:
    """A copy of `rows`, this rank's of a tensor that has as many as `like`, on its device and sharded as it is."""
    rows = rows.to(like.device, copy=True)
    if not hasattr(like, "placements"):
        return rows
    from torch.distributed.tensor import DTensor

    shape, placed = torch.Size([len(like), *rows.shape[1:]]), cast(Any, like)
    sizes: Any = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(rows, placed.device_mesh, placed.placements, run_check=False, **sizes)
