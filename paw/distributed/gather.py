"""Gathers full tensors from the ranks' shards in buckets, with one collective call per bucket.

With a call for each tensor, each call would wait for the slowest rank, and most tensors of a model
are too small to fill a link. A bucket has at most `BUCKET_BYTES` bytes of full tensors, so the
memory that a pass takes does not depend on the size of the model.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paw.distributed.ranks import full_tensor, local_tensor

Key = TypeVar("Key")

BUCKET_BYTES = 256 << 20
"""Maximum bytes of the full tensors in a bucket. A larger tensor is gathered alone.

At this size, the time to start a call is negligible beside the time to send its bytes, 5 ms at
50 GB/s. The largest tensor of most models, the embedding, is larger, so buckets do not raise the
peak of memory.
"""
ALIGNMENT = 16
"""Bytes. Every tensor in a bucket begins at a multiple of this, so that it can have any dtype."""

_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch's call, or its name before torch 2.13."""


@dataclass(frozen=True)
class Shard:
    """A tensor to gather, as this rank holds it."""

    tensor: Tensor
    """A DTensor sharded by rows, or a plain tensor, which is full already."""
    dtype: torch.dtype
    """The dtype of the full tensor. Rows are cast before they are sent."""

    @property
    def is_sharded(self) -> bool:
        return _shard_dim(self.tensor) is not None

    @property
    def full_bytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in the part of a bucket that each rank sends."""

    shard: Shard
    start: int
    """In bytes."""
    size: int
    """In bytes, without the gap up to the next slot. Equal on all ranks, as the last are padded."""

    def view(self, part: Tensor) -> Tensor:
        """Return the slot of `part` [..., bytes] in the tensor's dtype, [..., elements]."""
        return part[..., self.start : self.start + self.size].view(self.shard.dtype)


def gather_in_buckets(
    items: Iterable[tuple[Key, list[Shard]]], bucket_bytes: int | None = None
) -> Iterator[tuple[Key, list[Tensor]]]:
    """Yield (key, full tensors) of each item, in order. Every rank must call this.

    The tensors of an item are gathered together. `bucket_bytes` is BUCKET_BYTES by default. Plain
    tensors are cast and yielded when their turn comes, and take no room in a bucket. At any time, a
    rank holds one bucket and one of its items beside its own shards, unless the caller keeps items.
    """
    limit = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    bucket: list[tuple[Key, list[Shard]]] = []
    size = 0
    for key, shards in items:
        item_bytes = sum(shard.full_bytes for shard in shards if shard.is_sharded)
        if bucket and size + item_bytes > limit:
            yield from _gather_bucket(bucket)
            bucket = []
            size = 0
        bucket.append((key, shards))
        size += item_bytes
    if bucket:
        yield from _gather_bucket(bucket)


def _gather_bucket(
    bucket: list[tuple[Key, list[Shard]]],
) -> Iterator[tuple[Key, list[Tensor]]]:
    """Yield the bucket's items, full. Makes one collective call, or none without shards."""
    sharded = [shard for _, shards in bucket for shard in shards if shard.is_sharded]
    slots = _slots(sharded)
    gathered = None
    if slots:
        gathered = _all_gather(slots)

    remaining_slots = iter(slots)
    for key, shards in bucket:
        tensors: list[Tensor] = []
        for shard in shards:
            if gathered is not None and shard.is_sharded:
                tensors.append(_assemble(next(remaining_slots), gathered))
            else:
                tensors.append(full_tensor(shard.tensor).to(shard.dtype))
        yield key, tensors


def _slots(shards: list[Shard]) -> list[Slot]:
    """Return consecutive places for the shards."""
    slots: list[Slot] = []
    next_start = 0
    for shard in shards:
        row_bytes = prod(shard.tensor.shape[1:]) * shard.dtype.itemsize
        slot_bytes = _rows_per_rank(shard.tensor) * row_bytes
        slots.append(Slot(shard, start=next_start, size=slot_bytes))
        next_start += -(-slot_bytes // ALIGNMENT) * ALIGNMENT
    return slots


def _all_gather(slots: list[Slot]) -> Tensor:
    """Return what all ranks have in these slots, [ranks, bytes of a rank] uint8."""
    first_shard = slots[0].shard.tensor
    group = _group(first_shard)
    buffer_bytes = -(-(slots[-1].start + slots[-1].size) // ALIGNMENT) * ALIGNMENT
    own_bytes = torch.empty(
        buffer_bytes, dtype=torch.uint8, device=local_tensor(first_shard).device
    )
    for slot in slots:
        rows = local_tensor(slot.shard.tensor)
        slot.view(own_bytes)[: rows.numel()].view(rows.shape).copy_(rows)

    gathered = own_bytes.new_empty(dist.get_world_size(group), buffer_bytes)
    _all_gather_single(gathered.view(-1), own_bytes, group=group)
    if gathered.is_cuda:
        # vLLM's sender takes the tensors of one bucket in several streams of its own.
        torch.cuda.current_stream().synchronize()
    return gathered


def _assemble(slot: Slot, gathered: Tensor) -> Tensor:
    """Return the full tensor of a slot: a view if it is alone in its bucket, else a copy."""
    shape = slot.shard.tensor.shape
    if gathered.is_cuda:
        gathered.record_stream(torch.cuda.current_stream())
    gathered_rows = slot.view(gathered).reshape(-1)
    return gathered_rows[: shape.numel()].view(shape)


def _shard_dim(tensor: Tensor) -> int | None:
    """Return the dimension of the mesh over which the rows of a tensor are sharded, if any."""
    for dim, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard():
            return dim
    return None


def _group(tensor: Tensor) -> dist.ProcessGroup:
    """Return the ranks that together hold one copy of a sharded tensor."""
    sharded: Any = tensor
    return sharded.device_mesh.get_group(_shard_dim(tensor))


def _rows_per_rank(tensor: Tensor) -> int:
    """Return the number of rows of each rank except the last ones, which may have fewer or none."""
    sharded: Any = tensor
    return -(-len(tensor) // sharded.device_mesh.size(_shard_dim(tensor)))
