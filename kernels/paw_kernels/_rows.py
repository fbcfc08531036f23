"""The compiled row operations around torch's matmul: one [n, V] float32 buffer holds logits, then gradients.

Statistics read the buffer once; the gradient overwrites it in place, packed to the live rows. Memory: that buffer and,
on the CPU, a float32 copy of 16-bit weights (its matmuls cannot keep their float32 sums).
"""

import torch
from torch import Tensor

from paw_kernels._head import logits
from paw_kernels._native import cpu_library, row_gradient_, row_statistics
from paw_kernels.coefficients import Slopes

CHUNK_BYTES = 16 << 20
"""Of one chunk's logits: they stay in the last-level cache."""
CHUNK_ROWS = 256
"""At least: each chunk reads and writes the whole accumulator of dW."""


class NativeRows:
    def __init__(self, weight: Tensor, bias: Tensor | None, temperature: float, n: int) -> None:
        self.head = weight.float()
        self._bias = None if bias is None else bias.float().contiguous()
        self._scale = 1 / temperature
        self._buffer = torch.empty((n, weight.shape[0]), dtype=torch.float32, device=weight.device)
        self._log_sum = self._entropy = torch.empty(0)

    def forward(self, x: Tensor, target: Tensor, slopes: Slopes | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        z = logits(x, self.head, self._buffer)
        logp, self._entropy, self._log_sum = row_statistics(z, self._bias, target, self._scale)
        a, c = (logp, None) if slopes is None else slopes.at(logp)
        return logp, self._entropy, a, c

    def gradient(self, target: Tensor, source: Tensor, a: Tensor, c: Tensor | None) -> Tensor:
        z, scale = self._buffer, self._scale
        row_gradient_(z, self._bias, target, source, self._log_sum, self._entropy, a, c, scale)
        return self._buffer[: source.numel()]


def make_rows(
    weight: Tensor, bias: Tensor | None, temperature: float, N: int, gradients: bool
) -> tuple[NativeRows, int]:
    step = max(CHUNK_ROWS, CHUNK_BYTES // (4 * weight.shape[0]))
    return NativeRows(weight, bias, temperature, min(step, N)), step


def why_not(backend: str, device: torch.device) -> str | None:
    """Why "cpu" or "cuda" cannot run on that device, or None."""
    if device.type != backend:
        return f"it needs tensors of device {backend}, these are on {device}"
    if backend == "cpu" and cpu_library() is None:
        return "csrc/rows.cpp was not built; install a C++ compiler and repeat pip install -e ."
    if backend == "cuda":
        return "csrc/*.cu was not built; PAW_BUILD_CUDA=1 pip install --no-build-isolation -e . (needs nvcc)"
    return None
