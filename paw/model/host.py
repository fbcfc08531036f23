"""Host memory: the amount available, page-locked slabs, and copying tensors to the host in parts.

Slabs are needed because torch rounds each pinned tensor up to a power of two: 1.7 times the bytes
at 14B parameters.
"""

import math
import re
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

SLAB = 2 << 30
"""Bytes of a slab. It is a power of two, so torch does not round it up.

A larger tensor gets its own allocation.
"""
ALIGNMENT = 256


class HostMemory:
    """Allocates tensors that last for the whole run. Nothing is freed."""

    def __init__(self, *, slab: int = SLAB):
        self._slab = slab
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty_like(self, tensor: Tensor, *, pin: bool) -> Tensor:
        """Return an uninitialised tensor like `tensor` in shape and dtype, page-locked if `pin`."""
        aligned_bytes = math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
        if aligned_bytes > self._slab:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        if aligned_bytes > self._free.numel():
            self._free = torch.empty(self._slab, dtype=torch.uint8, pin_memory=pin)
        memory = self._free[: tensor.nbytes]
        self._free = self._free[aligned_bytes:]
        return memory.view(tensor.dtype).view(tensor.shape)


def in_parts(named: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Copy tensors to host memory in parts of at most `max_bytes` bytes, or of one tensor.

    The last part may be empty.
    """
    tensors: dict[str, Tensor] = {}
    part_bytes = 0
    for name, tensor in named:
        if tensors and part_bytes + tensor.nbytes > max_bytes:
            yield tensors
            tensors = {}
            part_bytes = 0
        tensors[name] = tensor.detach().cpu().contiguous()
        part_bytes += tensor.nbytes
    yield tensors


CGROUP_FILES = {
    "memory.max": "memory.current",
    "memory/memory.limit_in_bytes": "memory/memory.usage_in_bytes",
}
"""Files with a control group's memory limit and usage, in versions 2 and 1."""


def peak_gib(device: torch.device) -> float:
    """Return peak memory so far in GiB, of the GPU's allocator, or on a CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def available_memory(system: Path = Path("/")) -> int:
    """Return the bytes of memory left to this machine or its container. Caches count as free.

    Returns 0 if neither is known.
    """
    available = _numbers(system / "proc/meminfo").get("MemAvailable", 0) * 1024
    cgroup = system / "sys/fs/cgroup"
    for limit_file, usage_file in CGROUP_FILES.items():
        limit = _numbers(cgroup / limit_file)
        usage = _numbers(cgroup / usage_file)
        if limit and usage:
            statistics = _numbers((cgroup / usage_file).with_name("memory.stat"))
            reclaimable = statistics.get("inactive_file", 0)
            available = min(available, limit[""] - usage[""] + reclaimable)
    return max(0, available)


def _numbers(path: Path) -> dict[str, int]:
    """Read the numbers of a kernel file with lines "name 5", "name: 5 kB" or "5", by name.

    A number without a name has the key "".
    """
    if not path.is_file():
        return {}
    pairs = re.findall(r"^(?:(\w+):?\s+)?(\d+)(?: kB)?$", path.read_text(), re.M)
    return {name: int(number) for name, number in pairs}
