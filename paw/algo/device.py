"""Copies what the host has prepared to the device that computes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Each tensor of a buffer starts at a multiple of it, which every dtype accepts."""


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return one-dimensional arrays as tensors on `device`.

    On a GPU they are views of one buffer, which is copied at once from page-locked memory. The host
    does not wait for that copy, nor for the kernels that it launched before. On a CPU the tensors
    share the memory of the arrays.
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    with torch.cuda.device(device):
        buffer, starts = pack(tensors, pin_memory=True)
    return unpack(buffer.to(device, non_blocking=True), starts, like=tensors)


def pack(tensors: Sequence[Tensor], *, pin_memory: bool) -> tuple[Tensor, list[int]]:
    """Return a buffer [bytes] uint8 in host memory with the tensors, and where each starts."""
    starts: list[int] = []
    buffer_bytes = 0
    for tensor in tensors:
        starts.append(buffer_bytes)
        buffer_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pin_memory)
    for tensor, view in zip(tensors, unpack(buffer, starts, like=tensors), strict=True):
        view.copy_(tensor)
    return buffer, starts


def unpack(buffer: Tensor, starts: Sequence[int], *, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of a buffer that `pack` made; `like` has their dtypes and sizes."""
    tensors: list[Tensor] = []
    for start, tensor in zip(starts, like, strict=True):
        tensors.append(buffer[start : start + tensor.nbytes].view(tensor.dtype))
    return tensors
