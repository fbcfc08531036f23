"""Chunked plain-torch head: correct on every device, and the yardstick of the other backends.

Per chunk of n rows, z = (x W^T + b) / temperature is the one [n, V] buffer that matters; statistics come from
z - max z, gradients are formed in the same buffers, and only rows whose gradient is not zero reach the two matmuls.
Extra memory: about three float32 [n, V] buffers of CHUNK_BYTES each, the float32 accumulator of dW and, for 16-bit
weights on the CPU (where matmuls cannot keep their float32 sums), a float32 copy of the weight.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}
"""Bytes of one chunk's float32 logits. Large on GPUs: each chunk reads and writes the whole accumulator of dW."""

Coefficients = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None]]


class HeadPass(NamedTuple):
    """Results of one pass over N chosen rows; gradients are None where not asked for."""

    logp: Tensor
    """[N] float32."""
    entropy: Tensor
    """[N] float32, nats."""
    d_hidden: Tensor | None
    """[T, D] in the dtype of hidden; exactly 0 on rows that were not chosen or whose coefficients are 0."""
    d_weight: Tensor | None
    """[V, D] float32."""
    d_bias: Tensor | None
    """[V] float32."""


def head_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    index: Tensor,
    temperature: float,
    *,
    coefficients: Coefficients | None = None,
    wants: tuple[bool, bool, bool] = (False, False, False),
) -> HeadPass:
    """Statistics of the rows `index` ([N] int64, distinct) of hidden, and the gradients in the same pass.

    `coefficients(chunk, logp, entropy)` answers (a, c) of `index[chunk]`: upstream derivatives by logp and entropy,
    [n] float32, c None for all zeros. `wants` says which gradients to form: of hidden, weight, bias.
    """
    V, N = weight.shape[0], index.numel()
    mixed = hidden.is_cuda and hidden.dtype != torch.float32
    head = weight if mixed else weight.float()
    logp, entropy = torch.empty((2, N), dtype=torch.float32, device=hidden.device)
    d_hidden = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device) if wants[0] else None
    d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=hidden.device) if wants[1] else None
    d_bias = torch.zeros(V, dtype=torch.float32, device=hidden.device) if wants[2] else None

    step = max(1, CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cuda"]) // (4 * V))
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, N, step):
            chunk = slice(start, min(start + step, N))
            rows = index[chunk]
            x, y = hidden[rows], target[rows]
            if mixed:
                z = torch.mm(x, head.t(), out_dtype=torch.float32)
            else:
                x = x.float()
                z = torch.mm(x, head.t())
            if bias is not None:
                z += bias
            if temperature != 1.0:
                z *= 1 / temperature
            # e = exp(z) after the shift is kept: p = e / exp(log_sum) without a second exponential.
            e, log_sum, logp[chunk], entropy[chunk] = _statistics(z, y)
            if coefficients is None or not any(wants):
                continue

            a, c = coefficients(chunk, logp[chunk], entropy[chunk])
            live = (a != 0 if c is None else (a != 0) | (c != 0)).nonzero().squeeze(1)
            if live.numel() == 0:
                continue
            entropy_live = entropy[chunk]
            if live.numel() < rows.numel():
                rows, x, y, z, e = rows[live], x[live], y[live], z[live], e[live]
                a, log_sum, entropy_live = a[live], log_sum[live], entropy_live[live]
                c = None if c is None else c[live]
            dz = _logit_gradient(
                z, e, log_sum, entropy_live, y, a / temperature, None if c is None else c / temperature
            )

            if d_bias is not None:
                d_bias += dz.sum(0)
            if mixed:
                dz = dz.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden.index_copy_(0, rows, torch.mm(dz, head).to(hidden.dtype))
            if d_weight is not None:
                if mixed:
                    torch.addmm(d_weight, dz.t(), x, out_dtype=torch.float32, out=d_weight)
                else:
                    d_weight.addmm_(dz.t(), x)
    return HeadPass(logp, entropy, d_hidden, d_weight, d_bias)


def _statistics(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """exp(z), log sum exp(z), log-probability and entropy of n rows; z [n, V] is shifted in place to a maximum of 0.

    Both logp (<= 0) and the entropy (>= 0) are sums of terms of one sign: nothing cancels.
    """
    z -= z.amax(1, keepdim=True)
    e = z.exp()
    total = e.sum(1)
    log_sum = total.log()
    logp = z.gather(1, target[:, None]).squeeze(1) - log_sum
    entropy = log_sum - torch.linalg.vecdot(e, z) / total
    return e, log_sum, logp, entropy


def _logit_gradient(
    z: Tensor, e: Tensor, log_sum: Tensor, entropy: Tensor, target: Tensor, a: Tensor, c: Tensor | None
) -> Tensor:
    """a (1[j = y] - p_j) - c p_j (log p_j + H) as [n, V], built in the buffers of z and e."""
    scale = torch.exp(-log_sum)
    if c is None:
        dz = e.mul_((-a * scale)[:, None])
    else:
        offset = a + c * (entropy - log_sum)
        dz = z.mul_((-c * scale)[:, None]).sub_((offset * scale)[:, None]).mul_(e)
    return dz.scatter_add_(1, target[:, None], a[:, None])
