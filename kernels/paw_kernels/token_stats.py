"""Log-probability and entropy of each target token, without the [T, V] logits; differentiable.

For scoring passes, evaluation and losses that couple rows. Backward recomputes the logits, chunk by
chunk, of the rows whose upstream gradient is not zero. Memory: see the backend; nothing is saved
but the inputs. On a CPU logits that fit into `_rows.KEPT_BYTES` are kept instead.
"""

from collections.abc import Sequence
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
from paw_kernels._head import Head, MakeRows, has_gradient, head_pass
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
    """logp, entropy, and with `keep` what `KeptRows` leaves for the backward pass."""
    head, values = Head(weight, bias, temperature, softcap), Values(target, weight.shape[0])
    rows = KeptRows(head, len(hidden)) if keep else None
    make = _only(rows) if rows else resolve(backend, hidden, weight)
    result = head_pass(make, hidden, head, target, None, values=values)
    left = rows.left() if rows else (torch.empty(0), torch.empty(0), torch.empty(0))
    return result.logp, result.entropy, *left


def _only(rows: KeptRows) -> MakeRows:
    return lambda head, N, gradients: (rows, N)


_token_stats = torch.library.custom_op(
    "paw_kernels::token_stats", _one_pass, mutates_args=(), tags=TAGS
)


@_token_stats.register_fake
def _(hidden, weight, *rest):
    keep = len(rest) == 6 and rest[-1]
    T, n = hidden.shape[0], hidden.shape[0] if keep else 0
    shapes = [T], [T], [n, aligned(weight.shape[0])] if keep else [0], [n], [n]
    logp, entropy, z, *left = (hidden.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return logp, entropy, z[:, : weight.shape[0]] if keep else z, *left


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
    a, c = grad_logp[index], None if grad_entropy is None else grad_entropy[index]
    make, head = resolve(backend, hidden, weight), Head(weight, bias, temperature, softcap)
    return _gradients(make, hidden, head, target, index, a, c, wants)


def _gradients(
    make: MakeRows,
    hidden: Tensor,
    head: Head,
    target: Tensor,
    index: Tensor | None,
    a: Tensor,
    c: Tensor | None,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    def coefficients(chunk: slice, *_: Tensor) -> tuple[Tensor, Tensor | None]:
        return a[chunk], None if c is None else c[chunk]

    head = head._replace(entropy=c is not None)
    result = head_pass(make, hidden, head, target, index, coefficients, wants)
    d_hidden, d_weight, d_bias = (
        hidden.new_empty(0) if d is None else d.to(hidden.dtype) for d in result[2:5]
    )
    return d_hidden, d_weight, d_bias


@_token_stats_backward.register_fake
def _(hidden, weight, *rest):
    wants = rest[-1]
    shapes = hidden.shape, weight.shape, weight.shape[:1]
    return tuple(
        hidden.new_empty(shape if want else 0) for shape, want in zip(shapes, wants, strict=True)
    )


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *ctx.options, keep = inputs[4:]
    ctx.save_for_backward(*inputs[:4], *(output if keep else ()))
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
    if kept and not torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
        # Overwritten: with the graph kept there may be another backward pass, which needs the
        # logits as they are.
        head = Head(weight, bias, *ctx.options[:2])
        make = _only(KeptRows(head, len(hidden), kept))
        gradients = _gradients(make, hidden, head, target, None, grad_logp, grad_entropy, wants)
    else:
        gradients = _token_stats_backward(
            hidden, weight, bias, target, grad_logp, grad_entropy, *ctx.options, wants
        )
    return *(d if want else None for d, want in zip(gradients, wants, strict=True)), *[None] * 5


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
    """Log-probability and entropy of target [T] int64 under softmax(z), z = (hidden weight^T + bias) / temperature.

    With a soft cap z = softcap tanh(u / softcap) / temperature, u = hidden weight^T + bias (Gemma
    2, arXiv 2408.00118). hidden [T, D], weight [V, D] and bias [V] share one dtype (float32,
    bfloat16, float16) and device; statistics are computed from float32 logits and are float32
    whatever the inputs are. Differentiable in hidden, weight and bias.

    Raises ValueError for mismatched shapes, dtypes or devices, targets outside [0, V), a
    temperature or softcap that is not positive and finite, a backend that is unknown or cannot run
    here.
    """
    hidden, weight, bias = check_head(hidden, weight, target, bias, temperature, softcap)
    softcap = None if softcap is None else float(softcap)
    learns = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden, weight, bias)
    )
    keep = learns and keeps(hidden, weight) and resolve(backend, hidden, weight) is make_rows
    operator = _direct if unobserved(hidden, weight, bias, target) else _token_stats
    found = operator(hidden, weight, bias, target, float(temperature), softcap, backend, keep)
    return TokenStats(*found[:2])
