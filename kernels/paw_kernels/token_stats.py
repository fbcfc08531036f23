"""Differentiable log-probability and entropy of each target token, without the [T, V] logits.

They are for scoring passes, evaluation and losses that couple rows. Backward recomputes the logits
of the rows whose upstream gradient is not zero, chunk by chunk. Memory: see the backend. Only the
inputs are saved. On a CPU, logits that fit into `_rows.KEPT_BYTES` are kept instead of recomputed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paw_kernels._backend import resolve
from paw_kernels._checks import (
    TAGS,
    Values,
    check_head,
    refuse_second_derivatives,
    unobserved,
    without_dispatch,
)
from paw_kernels._head import Head, MakeRows, has_gradient, head_pass, rows_of
from paw_kernels._rows import KeptRows, aligned, keeps, make_rows


class TokenStats(NamedTuple):
    """Both [T] float32."""

    logp: Tensor
    """log softmax(z) at the target, <= 0."""
    entropy: Tensor
    """Entropy of the same distribution over the vocabulary, nats, >= 0."""


def _one_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float,
    softcap: float | None,
    backend: str,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return logp, entropy, and the tensors that `KeptRows` leaves for the backward pass (empty
    without `keep`)."""
    head = Head(weight, bias, temperature, softcap)
    values = Values(target, weight.shape[0])
    if not keep:
        backend_rows = resolve(backend, hidden, weight)
        result = head_pass(backend_rows, hidden, head, target, index=None, values=values)
        return result.logp, result.entropy, torch.empty(0), torch.empty(0), torch.empty(0)

    rows = KeptRows(head, len(hidden))
    result = head_pass(_one_chunk(rows), hidden, head, target, index=None, values=values)
    return result.logp, result.entropy, *rows.left()


def _one_chunk(rows: KeptRows) -> MakeRows:
    """Give a pass these rows as its only chunk."""
    return lambda head, N, gradients: (rows, N)


_token_stats = torch.library.custom_op(
    "paw_kernels::token_stats", _one_pass, mutates_args=(), tags=TAGS
)


@_token_stats.register_fake
def _(hidden, weight, *rest):
    keep = len(rest) == 6 and rest[-1]
    T = hidden.shape[0]
    V = weight.shape[0]
    new_empty = partial(hidden.new_empty, dtype=torch.float32)
    if not keep:
        return new_empty(T), new_empty(T), new_empty(0), new_empty(0), new_empty(0)
    logits = new_empty((T, aligned(V)))[:, :V]
    return new_empty(T), new_empty(T), logits, new_empty(T), new_empty(T)


@torch.library.custom_op("paw_kernels::token_stats_backward", mutates_args=(), tags=TAGS)
def _token_stats_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
    backend: str,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    index = has_gradient(grad_logp, grad_entropy).nonzero().squeeze(1)
    return _gradients(
        resolve(backend, hidden, weight),
        hidden,
        Head(weight, bias, temperature, softcap),
        target,
        index=index,
        a=grad_logp[index],
        c=rows_of(grad_entropy, index),
        wants=wants,
    )


def _gradients(
    make_rows: MakeRows,
    hidden: Tensor,
    head: Head,
    target: Tensor,
    index: Tensor | None,
    a: Tensor,
    c: Tensor | None,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dL/dhidden, dL/dweight and dL/dbias in the dtype of hidden, empty unless in `wants`.

    a = dL/dlogp and c = dL/dentropy ([N] float32, c None for all zeros) belong to the rows `index`
    ([N] int64; None for all).
    """

    def coefficients(chunk: slice, *_: Tensor) -> tuple[Tensor, Tensor | None]:
        return a[chunk], rows_of(c, chunk)

    head = head._replace(entropy=c is not None)
    result = head_pass(make_rows, hidden, head, target, index, coefficients, wants)
    d_hidden, d_weight, d_bias = (
        hidden.new_empty(0) if gradient is None else gradient.to(hidden.dtype)
        for gradient in (result.d_hidden, result.d_weight, result.d_bias)
    )
    return d_hidden, d_weight, d_bias


@_token_stats_backward.register_fake
def _(hidden, weight, *rest):
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    gradients = []
    for shape, wanted in zip(shapes, rest[-1], strict=True):
        gradients.append(hidden.new_empty(shape if wanted else 0))
    return tuple(gradients)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, target, temperature, softcap, backend, keep = inputs
    ctx.temperature = temperature
    ctx.softcap = softcap
    ctx.backend = backend
    saved = [hidden, weight, bias, target]
    if keep:
        saved += output
    ctx.save_for_backward(*saved)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives("token_stats")
    hidden, weight, bias, target, *kept = ctx.saved_tensors
    if grad_logp is None:
        assert grad_entropy is not None, "backward of neither output"
        grad_logp = torch.zeros_like(grad_entropy)
    wants = list(ctx.needs_input_grad[:3])
    keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
    if kept and not keep_graph:
        # This overwrites the kept logits. If the graph is kept, another backward pass may need them
        # unchanged.
        head = Head(weight, bias, ctx.temperature, ctx.softcap)
        rows = KeptRows(head, len(hidden), kept)
        gradients = _gradients(
            _one_chunk(rows),
            hidden,
            head,
            target,
            index=None,
            a=grad_logp,
            c=grad_entropy,
            wants=wants,
        )
    else:
        gradients = _token_stats_backward(
            hidden,
            weight,
            bias,
            target,
            grad_logp,
            grad_entropy,
            ctx.temperature,
            ctx.softcap,
            ctx.backend,
            wants,
        )

    d_hidden, d_weight, d_bias = (
        gradient if wanted else None for gradient, wanted in zip(gradients, wants, strict=True)
    )
    # Then the gradients of target, temperature, softcap, backend and keep.
    return d_hidden, d_weight, d_bias, None, None, None, None, None


_token_stats.register_autograd(_backward, setup_context=_save)
_direct = without_dispatch(_one_pass, _save, _backward)


def token_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> TokenStats:
    """Return log-probability and entropy of target [T] int64 under softmax(z).

    z is (hidden weight^T + bias) / temperature. With a soft cap, z = softcap tanh(u / softcap) /
    temperature, u = hidden weight^T + bias (Gemma 2, arXiv 2408.00118). hidden [T, D], weight [V,
    D] and bias [V] share one dtype (float32, bfloat16, float16) and device. Statistics are computed
    from float32 logits and are float32 whatever the inputs are. They are differentiable in hidden,
    weight and bias.

    Raises ValueError for mismatched shapes, dtypes or devices, targets outside [0, V), a
    temperature or softcap that is not positive and finite, or a backend that is unknown or cannot
    run here.
    """
    hidden, weight, bias = check_head(hidden, weight, target, bias, temperature, softcap)
    needs_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    keep = (
        needs_gradient and keeps(hidden, weight) and resolve(backend, hidden, weight) is make_rows
    )
    operator = _token_stats
    if unobserved(hidden, weight, bias, target):
        operator = _direct
    if softcap is not None:
        softcap = float(softcap)
    logp, entropy, *_ = operator(
        hidden,
        weight,
        bias,
        target,
        float(temperature),
        softcap,
        backend,
        keep,
    )
    return TokenStats(logp, entropy)
