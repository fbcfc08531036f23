"""Policy and world-model loss of packed tokens in one pass: gradients are formed while the chunk's logits are there.

A pass costs 1 + 2f matmuls of [T, D] by [V, D], f the share of rows with a gradient (`PawLoss.live`): masked
observation tokens (p > rho), clipped actions and zero weights drop out before the two gradient matmuls. Backward
scales the stored gradients. Memory: the gradients of hidden [T, D] and of weight [V, D] (float32) are kept from
forward to backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paw_kernels._backend import resolve
from paw_kernels._checks import check_head, out_of_range, raise_first
from paw_kernels.coefficients import LossRows, RowTerms, row_terms


@dataclass(frozen=True)
class PawLoss:
    """The loss, and per-row results [T] for metrics: detached, 0 or False on skipped rows, float32 unless noted."""

    loss: Tensor
    """Scalar, sum_t weight_t * row_loss_t; differentiable in hidden, weight and bias."""
    row_loss: Tensor
    """Before the row weight."""
    logp: Tensor
    entropy: Tensor
    kl: Tensor
    """k3 estimate on action rows, clamped to 10; 0 without ref_logp."""
    live: Tensor
    """bool: rows whose gradient is not zero; their share of T is f."""
    clipped: Tensor
    """bool: action rows where the clip, or the dual clip, stops the policy gradient."""
    masked: Tensor
    """bool: observation rows that the CMAE mask leaves out."""


class _PawLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        index: Tensor,
        rows: LossRows,
        temperature: float,
        head_pass: Callable,
        wants: tuple[bool, bool, bool],
    ) -> tuple[Tensor, ...]:
        # Without gradients one evaluation after the pass does; with them each chunk's coefficients are needed inside.
        chunks: list[RowTerms] = []

        def coefficients(chunk: slice, logp: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
            chunks.append(row_terms(logp, entropy, rows.take(chunk)))
            return chunks[-1].a, chunks[-1].c

        result = head_pass(hidden, weight, bias, target, index, temperature, coefficients=coefficients, wants=wants)
        if not chunks:
            coefficients(slice(None), result.logp, result.entropy)
        row_loss = torch.cat([terms.loss for terms in chunks])
        live = torch.cat([terms.a != 0 if terms.c is None else (terms.a != 0) | (terms.c != 0) for terms in chunks])
        per_row = (
            row_loss,
            result.logp,
            result.entropy,
            torch.cat([terms.kl for terms in chunks]),
            live,
            torch.cat([terms.clipped for terms in chunks]),
            torch.cat([terms.masked for terms in chunks]),
        )
        scattered = [v.new_zeros(hidden.shape[0]).index_copy_(0, index, v) for v in per_row]
        ctx.save_for_backward(result.d_hidden, result.d_weight, result.d_bias)
        ctx.dtype = hidden.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*scattered)
        return (rows.weight * row_loss).sum(), *scattered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        # The product is written in the parameter's dtype, so no second float32 [V, D] appears.
        scaled = [
            None if d is None else torch.mul(d, grad_loss, out=torch.empty_like(d, dtype=ctx.dtype))
            for d in ctx.saved_tensors
        ]
        return *scaled, None, None, None, None, None, None


def paw_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    rows: LossRows,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    backend: str = "auto",
) -> PawLoss:
    """sum_t weight_t * l_t over action and observation rows, with l as `paw_kernels.coefficients` defines it.

    hidden [T, D], weight [V, D] and bias [V] share one dtype (float32, bfloat16, float16) and device; target [T] int64.
    Logits, statistics and the loss are float32. Rows of kind 0 are never read, nor are their targets. NaN in a row
    that is read makes the loss NaN. No gradient is formed under no_grad or for inputs that require none.

    Raises ValueError, naming the argument, for mismatched shapes, dtypes or devices, targets outside [0, V), values
    in `rows` that are not finite where they are read, an unknown backend.
    """
    check_head(hidden, weight, target, bias, temperature)
    rows.check(hidden.shape[0], hidden.device)
    head_pass = resolve(backend)
    index = rows.kind.nonzero().squeeze(1)
    chosen = rows.take(index)
    bad_target = out_of_range(target[index], weight.shape[0])
    raise_first({f"target must be in [0, {weight.shape[0]}) on rows with kind != 0": bad_target, **chosen.problems()})
    grad = torch.is_grad_enabled()
    wants = (
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )
    loss, row_loss, logp, entropy, kl, live, clipped, masked = _PawLoss.apply(
        hidden, weight, bias, target, index, chosen, float(temperature), head_pass, wants
    )
    return PawLoss(loss, row_loss, logp, entropy, kl, live, clipped, masked)
