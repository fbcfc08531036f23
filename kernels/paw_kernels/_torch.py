"""The row operations in plain torch, for every device. Fallback and reference of other backends.

Memory: three float32 [n, V] buffers of CHUNK_BYTES each, or five with a soft cap. With 16-bit
weights on the CPU, whose matmuls cannot return float32 sums, there is also a float32 copy of the
weight.
"""

import torch
from torch import Tensor

from paw_kernels._head import Head, chunk_bytes, equal_chunks, logits, rows_of

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}
"""Bytes of one chunk's float32 logits.

This is large on GPUs, because each chunk reads and writes the whole accumulator of dW.
"""
CHUNK_ROWS = 128
"""Minimum rows of a chunk on a CPU. With fewer rows, its matmuls are slow."""

_FLOOR = -1e30
"""Smallest logit of a non-target token. With a bias of -inf, 0 * inf would be NaN, not 0."""


class TorchRows:
    def __init__(self, head: Head, n: int) -> None:
        weight = head.weight
        self._bias = head.bias
        self._temperature = head.temperature
        self._softcap = head.softcap
        self.head = weight if weight.is_cuda else weight.float()
        buffers = torch.empty((2, n, weight.shape[0]), dtype=torch.float32, device=weight.device)
        self._z, self._e = buffers
        self._top = self._log_sum = self._entropy = torch.empty(0)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """See `_head.Rows`.

        Logits are shifted by the row's maximum, so that logp (<= 0) and entropy (>= 0) are sums of
        terms of one sign.
        """
        n = x.shape[0]
        z = logits(x, self.head, self._z)
        if self._bias is not None:
            z += self._bias
        if self._softcap is not None:
            z.div_(self._softcap).tanh_().mul_(self._softcap)
        self._top = z.amax(1)
        z -= self._top[:, None]
        if self._temperature != 1.0:  # scaling the difference is exact for logits of any size
            z *= 1 / self._temperature
        chosen = z.gather(1, target[:, None]).squeeze(1)
        if self._bias is not None:
            z.clamp_(min=_FLOOR)
        # Keep e = exp(z): p = e / exp(log_sum) then needs no second exponential.
        e = torch.exp(z, out=self._e[:n])
        total = e.sum(1)
        self._log_sum = total.log()
        logp = chosen - self._log_sum
        self._entropy = self._log_sum - torch.linalg.vecdot(e, z) / total
        return logp, self._entropy

    def gradient(self, target: Tensor, source: Tensor, a: Tensor, c: Tensor | None) -> Tensor:
        """Return (a (1[j = y] - p_j) - c p_j (log p_j + H)) / temperature in the buffers z and e.

        With a soft cap, this is multiplied by 1 - tanh^2, from z, which is still known.
        """
        n = target.numel()
        z = self._z[:n]
        e = self._e[:n]
        top = self._top
        log_sum = self._log_sum
        entropy = self._entropy
        a = a / self._temperature
        if c is not None:
            c = c / self._temperature
        if source.numel() < n:
            z = z[source]
            e = e[source]
            top = top[source]
            log_sum = log_sum[source]
            entropy = entropy[source]
            a = a[source]
            c = rows_of(c, source)
            target = target[source]
        slope = None
        if self._softcap is not None:
            tanh = z.mul(self._temperature / self._softcap).add_((top / self._softcap)[:, None])
            slope = tanh.square_().neg_().add_(1)
        scale = torch.exp(-log_sum)
        if c is None:
            dz = e.mul_((-a * scale)[:, None])
        else:
            offset = a + c * (entropy - log_sum)
            dz = z.mul_((-c * scale)[:, None]).sub_((offset * scale)[:, None]).mul_(e)
        dz.scatter_add_(1, target[:, None], a[:, None])
        if slope is not None:
            dz.mul_(slope)
        return dz.to(self.head.dtype)


def make_rows(head: Head, N: int, gradients: bool) -> tuple[TorchRows, int]:
    device = head.weight.device
    available = chunk_bytes(CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]), device)
    most_rows = available // (4 * head.weight.shape[0])
    least_rows = CHUNK_ROWS if device.type == "cpu" else 1
    step = equal_chunks(N, max(least_rows, most_rows))
    return TorchRows(head, min(step, N)), step
