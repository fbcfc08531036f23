"""Log-probability and entropy of each target token, without the [T, V] logits; differentiable.

For scoring passes, evaluation and losses that couple rows. Backward recomputes the logits, chunk by chunk, of the
rows whose upstream gradient is not zero. Memory: see the backend; nothing is saved but the inputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paw_kernels._backend import resolve
from paw_kernels._checks import check_head, out_of_range, raise_first


class TokenStats(NamedTuple):
    """Both [T] float32."""

    logp: Tensor
    """log softmax((hidden W^T + b) / temperature) at the target, <= 0."""
    entropy: Tensor
    """Entropy of the same distribution over the vocabulary, nats, >= 0."""


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: float,
        head_pass: Callable,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.temperature, ctx.head_pass = temperature, head_pass
        ctx.set_materialize_grads(False)
        index = torch.arange(hidden.shape[0], device=hidden.device)
        result = head_pass(hidden, weight, bias, target, index, temperature)
        return result.logp, result.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target = ctx.saved_tensors
        a = torch.zeros(hidden.shape[0], device=hidden.device) if grad_logp is None else grad_logp
        c = grad_entropy
        index = (a != 0 if c is None else (a != 0) | (c != 0)).nonzero().squeeze(1)
        a, c = a[index], None if c is None else c[index]
        result = ctx.head_pass(
            hidden,
            weight,
            bias,
            target,
            index,
            ctx.temperature,
            coefficients=lambda chunk, logp, entropy: (a[chunk], None if c is None else c[chunk]),
            wants=ctx.needs_input_grad[:3],
        )
        d_weight = None if result.d_weight is None else result.d_weight.to(weight.dtype)
        d_bias = None if result.d_bias is None else result.d_bias.to(weight.dtype)
        return result.d_hidden, d_weight, d_bias, None, None, None


def token_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    backend: str = "auto",
) -> TokenStats:
    """Log-probability and entropy of target [T] int64 under softmax((hidden weight^T + bias) / temperature).

    hidden [T, D], weight [V, D] and bias [V] share one dtype (float32, bfloat16, float16) and device; statistics are
    computed from float32 logits and are float32 whatever the inputs are. Differentiable in hidden, weight and bias.

    Raises ValueError for mismatched shapes, dtypes or devices, targets outside [0, V), an unknown backend.
    """
    check_head(hidden, weight, target, bias, temperature)
    raise_first({f"target must be in [0, {weight.shape[0]})": out_of_range(target, weight.shape[0])})
    return TokenStats(*_TokenStats.apply(hidden, weight, bias, target, float(temperature), resolve(backend)))
