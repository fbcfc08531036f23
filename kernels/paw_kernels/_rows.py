"""The compiled row operations around torch's matmul.

One [n, V] float32 buffer holds logits, then gradients. Memory: that buffer and, on the CPU, a
float32 copy of 16-bit weights, because its 16-bit matmuls cannot return float32 sums.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paw_kernels._head import Head, chunk_bytes, equal_chunks, logits
from paw_kernels._native import claim_memory, packed_rows, why_no_cpu_library, why_no_cuda

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1400 << 20}
"""Bytes of one chunk's logits. On the CPU they stay in the last-level cache."""
ROOMY_BYTES = 2400 << 20
"""The limit on a GPU with eight times as much free memory. 4,096 rows of 152,064 make one chunk."""
CHUNK_ROWS = 256
"""Minimum rows of a chunk, because each chunk reads and writes the whole accumulator of dW."""
KEPT_BYTES = 160 << 20
"""Up to this size, `token_stats` keeps all logits from forward to backward on a CPU. Larger ones
are recomputed."""


class NativeRows:
    def __init__(self, head: Head, n: int) -> None:
        weight = head.weight
        V = weight.shape[0]
        self.head = weight if weight.is_cuda else weight.float()
        self._bias = None
        if head.bias is not None:
            self._bias = head.bias.float().contiguous()
        self._scale = 1 / head.temperature
        self._softcap = head.softcap
        memory = torch.empty((n, aligned(V)), dtype=torch.float32, device=weight.device)
        self._buffer = claim_memory(memory)[:, :V]
        self._top = self._log_total = self._entropy = torch.empty(0)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        z = logits(x, self.head, self._buffer)
        statistics = torch.ops.paw_kernels.row_statistics(
            z, self._bias, target, self._scale, self._softcap
        )
        logp, self._entropy, self._top, self._log_total = statistics
        return logp, self._entropy

    def gradient(self, target: Tensor, source: Tensor, a: Tensor, c: Tensor | None) -> Tensor:
        z = self._buffer[: target.numel()]
        torch.ops.paw_kernels.row_gradient_(
            z,
            self._bias,
            target,
            source,
            self._top,
            self._log_total,
            self._entropy,
            a,
            c,
            self._scale,
            self.head.dtype,
            self._softcap,
        )
        return packed_rows(z, source.numel(), self.head.dtype)


class KeptRows(NativeRows):
    """All N rows of a pass in one chunk.

    If given `kept`, the results of an earlier pass, `forward` computes nothing.
    """

    def __init__(self, head: Head, N: int, kept: Sequence[Tensor] = ()) -> None:
        super().__init__(head, 0 if kept else N)
        self._logp = None
        if kept:
            self._logp, self._entropy, self._buffer, self._top, self._log_total = kept

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if self._logp is None:
            return super().forward(x, target)
        return self._logp, self._entropy

    def left(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [N, V], top and log_total [N]. After logp and entropy, they make `kept`."""
        return self._buffer, self._top, self._log_total


def keeps(hidden: Tensor, weight: Tensor) -> bool:
    """Whether a pass over these may keep its logits.

    A traced pass does not, because it cannot know in advance.
    """
    are_plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in (hidden, weight))
    logits_fit = hidden.device.type == "cpu" and 0 < 4 * len(hidden) * len(weight) <= KEPT_BYTES
    return are_plain and logits_fit and not torch.compiler.is_compiling()


def make_rows(head: Head, N: int, gradients: bool) -> tuple[NativeRows, int]:
    weight = head.weight
    available = chunk_bytes(CHUNK_BYTES[weight.device.type], weight.device, ROOMY_BYTES)
    most_rows = available // (4 * aligned(weight.shape[0]))
    step = equal_chunks(N, max(CHUNK_ROWS, most_rows))
    return NativeRows(head, min(step, N)), step


def aligned(V: int) -> int:
    """Return the elements from one row to the next.

    Rows are 16-byte aligned, for wide accesses in 32 and 16 bits.
    """
    return -(-V // 4) * 4


def why_not(backend: str, device: torch.device) -> str | None:
    """Return why "cpu" or "cuda" cannot run on that device, or None."""
    if device.type != backend:
        return f"it needs tensors on {backend}, but these are on {device}"
    if backend == "cuda":
        capability = None
        if why_no_cuda() is None and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability(device)
        return why_no_cuda(capability)
    return why_no_cpu_library()
