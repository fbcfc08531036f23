"""Host memory: what is available, tensors in it part by part, and page-locked slabs of it, for torch rounds each tensor
of `pin_memory` up to a power of two, 1.7 times at 14B."""

import math
import re
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

SLAB = 2 << 30
"""Bytes; a power of two, which stays what it is. A larger tensor has memory of its own."""
ALIGNMENT = 256


class HostMemory:
    """Tensors that stay for the run; nothing is given back."""

    def __init__(self, *, slab: int = SLAB):
        self._slab = slab
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty_like(self, tensor: Tensor, *, pin: bool) -> Tensor:
        """Uninitialised, of the shape and dtype of `tensor`, page-locked with `pin`."""
        size = math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
        if size > self._slab:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        if size > self._free.numel():
            self._free = torch.empty(self._slab, dtype=torch.uint8, pin_memory=pin)
        part, self._free = self._free[: tensor.nbytes], self._free[size:]
        return part.view(tensor.dtype).view(tensor.shape)


def in_parts(named: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """Tensors brought to host memory in parts of at most `most` bytes, or a single tensor; the last may be empty."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named:
        if part and size + tensor.nbytes > most:
            yield part
            part, size = {}, 0
        part[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    yield part


CONTAINER = {"memory.max": "memory.current", "memory/memory.limit_in_bytes": "memory/memory.usage_in_bytes"}
"""Files of a control group's limit and of what it uses: version 2's, and version 1's."""


def peak_gib(device: torch.device) -> float:
    """Peak memory so far: of the GPU's allocator, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def available_memory(system: Path = Path("/")) -> int:
    """Bytes that this machine, or the container's limit, has left, caches not counted; 0 where neither tells."""
    room = _numbers(system / "proc/meminfo").get("MemAvailable", 0) * 1024
    for limit, used in CONTAINER.items():
        limited, taken = system / "sys/fs/cgroup" / limit, system / "sys/fs/cgroup" / used
        if (most := _numbers(limited)) and (now := _numbers(taken)):
            room = min(room, most[""] - now[""] + _numbers(taken.with_name("memory.stat")).get("inactive_file", 0))
    return max(0, room)


def _numbers(path: Path) -> dict[str, int]:
    """Lines "name 5", "name: 5 kB" or "5" of a file of the kernel's."""
    found = re.findall(r"^(?:(\w+):?\s+)?(\d+)(?: kB)?$", path.read_text(), re.M) if path.is_file() else []
    return {name: int(value) for name, value in found}
