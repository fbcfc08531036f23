"""Page-locked host memory in slabs: torch rounds each tensor of `pin_memory` up to a power of two, 1.7 times at 14B."""

import math

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
