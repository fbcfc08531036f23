"""Policy and world-model loss of packed tokens in one pass: gradients are formed while the chunk's logits are there.

A pass costs 1 + 2f matmuls of [T, D] by [V, D], f the share of rows with a gradient (`PawLoss.live`): masked
observation tokens (p > rho), clipped actions and zero weights drop out before the two gradient matmuls. Backward
hands over the gradients (scaled, if the loss was). Memory: the gradients of hidden [T, D] and weight [V, D] are kept
from forward to backward, and a float32 sum of the latter during a forward of several chunks.

The whole pass is one torch.library operator, so torch.compile and FakeTensorMode take it as it is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paw_kernels._backend import resolve
from paw_kernels._checks import TAGS, check_head, out_of_range, raise_first, refuse_second_derivatives
from paw_kernels._head import gradient_dtype, head_pass, live_rows
from paw_kernels.coefficients import LossRows, row_terms, slopes


class PawLoss(NamedTuple):
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


_SCHEMA = """(
    Tensor hidden, Tensor weight, Tensor? bias, Tensor target, float temperature, float? softcap,
    Tensor kind, Tensor row_weight, Tensor advantage, Tensor old_logp, Tensor? ref_logp,
    float clip_low, float clip_high, float dual_clip, float kl_coef, float entropy_coef, float rho,
    str observation_loss, float q, str backend, bool[] wants
) -> (
    Tensor loss, Tensor row_loss, Tensor logp, Tensor entropy, Tensor kl, Tensor live, Tensor clipped, Tensor masked,
    Tensor d_hidden, Tensor d_weight, Tensor d_bias
)"""
"""The fields of PawLoss, then the gradients (`gradient_dtype`, empty where not in `wants`)."""


@torch.library.custom_op("paw_kernels::paw_loss", mutates_args=(), schema=" ".join(_SCHEMA.split()), tags=TAGS)
def _paw_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float,
    softcap: float | None,
    kind: Tensor,
    row_weight: Tensor,
    advantage: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor | None,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    kl_coef: float,
    entropy_coef: float,
    rho: float,
    observation_loss: str,
    q: float,
    backend: str,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    index = kind.nonzero().squeeze(1)
    clips, world = (clip_low, clip_high, dual_clip), (rho, observation_loss, q)
    every = LossRows(kind, row_weight, advantage, old_logp, ref_logp, *clips, kl_coef, entropy_coef, *world)
    rows = every.take(index)
    bad_target = out_of_range(target[index], weight.shape[0])
    raise_first({f"target must be in [0, {weight.shape[0]}) on rows with kind != 0": bad_target, **rows.problems()})

    of = slopes(rows)
    result = head_pass(
        resolve(backend, hidden),
        hidden,
        weight,
        bias,
        target,
        index,
        temperature,
        softcap,
        slopes=of,
        wants=(wants[0], wants[1], wants[2]),
    )
    terms = row_terms(result.logp, result.entropy, rows, of)

    def per_token(values: Tensor) -> Tensor:
        return values.new_zeros(hidden.shape[0]).index_copy_(0, index, values)

    return (
        (rows.weight * terms.loss).sum(),
        per_token(terms.loss),
        per_token(result.logp),
        per_token(result.entropy),
        per_token(terms.kl),
        per_token(live_rows(*of.at(result.logp))),
        per_token(terms.clipped),
        per_token(terms.masked),
        *(hidden.new_empty(0) if d is None else d for d in (result.d_hidden, result.d_weight, result.d_bias)),
    )


@_paw_loss.register_fake
def _(hidden, weight, bias, target, temperature, softcap, kind, row_weight, *rest) -> tuple[Tensor, ...]:
    T, wants = hidden.shape[0], rest[-1]
    number, flag = (lambda: row_weight.new_empty(T)), (lambda: kind.new_empty(T, dtype=torch.bool))
    per_token = number(), number(), number(), number(), flag(), flag(), flag()
    shapes = hidden.shape, weight.shape, weight.shape[:1]
    dtype = gradient_dtype(hidden.dtype)
    empty = [hidden.new_empty(s, dtype=dtype) if w else hidden.new_empty(0) for s, w in zip(shapes, wants, strict=True)]
    return row_weight.new_empty(()), *per_token, *empty


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    # Kept as attributes, not saved for backward, so that the first backward can hand them over and let go of them.
    # That makes no reference cycle, because they take no part in autograd.
    ctx.gradients = output[8:]
    ctx.mark_non_differentiable(*output[8:])
    ctx.wants, ctx.dtype = inputs[-1], inputs[0].dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, factor: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives("paw_loss")
    if ctx.gradients is None:
        raise RuntimeError("backward through paw_loss a second time; the first needs retain_graph=True")
    gradients = [d if want else None for d, want in zip(ctx.gradients, ctx.wants, strict=True)]
    keep = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
    traced = type(factor) is not Tensor  # a fake or functional tensor has no value to look at
    if keep or traced or factor != 1:
        gradients = [None if d is None else d * factor for d in gradients]
    if not keep:
        ctx.gradients = None
    return *(None if d is None else d.to(ctx.dtype) for d in gradients), *[None] * 18


_paw_loss.register_autograd(_backward, setup_context=_save)


def paw_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    rows: LossRows,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> PawLoss:
    """sum_t weight_t * l_t over action and observation rows, with l as `paw_kernels.coefficients` defines it.

    hidden [T, D], weight [V, D] and bias [V] share one dtype (float32, bfloat16, float16) and device; target [T] int64.
    softcap: see `token_stats`. Logits, statistics and the loss are float32. Rows of kind 0 are never read, nor are
    their targets. NaN in a row that is read makes the loss NaN. No gradient is formed under no_grad or for inputs that
    require none.

    Raises ValueError, naming the argument, for mismatched shapes, dtypes or devices, targets outside [0, V), values
    in `rows` that are not finite where they are read, a temperature or softcap that is not positive and finite, a
    backend that is unknown or cannot run here.
    """
    hidden, weight, bias = check_head(hidden, weight, target, bias, temperature, softcap)
    rows.check(hidden.shape[0], hidden.device)
    grad = torch.is_grad_enabled()
    wants = [grad and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    loss, *per_token = _paw_loss(
        hidden,
        weight,
        bias,
        target,
        float(temperature),
        None if softcap is None else float(softcap),
        rows.kind,
        rows.weight,
        rows.advantage,
        rows.old_logp,
        rows.ref_logp,
        rows.clip_low,
        rows.clip_high,
        rows.dual_clip,
        rows.kl_coef,
        rows.entropy_coef,
        rows.rho,
        rows.observation_loss,
        rows.q,
        backend,
        wants,
    )[:8]
    return PawLoss(loss, *(v.detach() for v in per_token))
