"""A loss of packed tokens in one pass through the head: gradients are formed while the chunk's logits are there.

A loss is a function of each token's log-probability l and entropy H, written in plain torch:

    def cross_entropy(logp, entropy, batch):  # [n], [n], the tensors of `batch` at these n tokens -> [n]
        return -batch.weight * logp

Its derivatives a = dL/dl and c = dL/dH come from autograd on vectors of n numbers. They are all
that the head needs:

    dL/dz_j = a (1[j = y] - p_j) - c p_j (log p_j + H)

A pass costs 1 + 2f matmuls of [T, D] by [V, D], f the share of tokens with a gradient: masked
observation tokens, clipped actions and zero weights drop out before the two gradient matmuls.
Backward hands over the gradients (scaled, if the loss was). Memory: the gradients of hidden [T, D]
and weight [V, D] are kept from forward to backward, and a float32 sum of the latter during a
forward of several chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from paw_kernels._backend import resolve
from paw_kernels._checks import (
    TAGS,
    Values,
    check_head,
    check_tensor,
    refuse_second_derivatives,
    unobserved,
    without_dispatch,
)
from paw_kernels._head import Head, gradient_dtype, head_pass

LossFunction = Callable[[Tensor, Tensor, Any], Tensor]
"""(logp [n], entropy [n], batch) -> the loss of each token [n], weights and normalisers included; float32.

Each token's loss may depend on its own log-probability and entropy alone: the head cuts tokens into
chunks. Derivatives must be finite where log p is -inf.
"""

_known: "WeakValueDictionary[str, Loss]" = WeakValueDictionary()
_numbers = count()
_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
"""What is dispatched where no operator runs."""


class Loss:
    """A loss function that `torch.compile` may use too; also a decorator.

    Made once, outside of what is compiled.
    """

    def __init__(self, function: LossFunction) -> None:
        self.function, self.key = function, str(next(_numbers))
        _known[self.key] = self

    def __call__(self, logp: Tensor, entropy: Tensor, batch: Any) -> Tensor:
        return self.function(logp, entropy, batch)


class TokenLoss(NamedTuple):
    """The loss, and results of each token [T]: detached, float32 unless noted."""

    loss: Tensor
    """Scalar, the sum over tokens; differentiable in hidden, weight and bias."""
    token_loss: Tensor
    logp: Tensor
    entropy: Tensor
    has_gradient: Tensor
    """bool: tokens whose gradient is not zero; their share is f."""


_SCHEMA = """(
    Tensor hidden, Tensor weight, Tensor? bias, Tensor target, float temperature, float? softcap,
    Tensor[] values, str names, str loss, str backend, bool[] wants
) -> (
    Tensor loss, Tensor token_loss, Tensor logp, Tensor entropy, Tensor has_gradient,
    Tensor d_hidden, Tensor d_weight, Tensor d_bias
)"""
"""The fields of TokenLoss, then the gradients (`gradient_dtype`, empty where not in `wants`).
Operators take neither functions nor dataclasses: `loss` is the key of a `Loss`, `names` are those
of `values`, "x?" is x = None."""


def _one_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float,
    softcap: float | None,
    values: Sequence[Tensor],
    names: str,
    loss: str,
    backend: str,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    present = [name for name in names.split(",") if name and not name.endswith("?")]
    absent: dict[str, Any] = {name[:-1]: None for name in names.split(",") if name.endswith("?")}
    batch = dict(zip(present, values, strict=True))
    numbers = [(name, value) for name, value in batch.items() if value.is_floating_point()]
    function, T = _known[loss], hidden.shape[0]
    token_loss = hidden.new_empty(T, dtype=torch.float32)

    def coefficients(chunk: slice, logp: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        part = SimpleNamespace(**absent, **{name: value[chunk] for name, value in batch.items()})
        # An operator runs below autograd, and below any mode that sees it: here that is undone.
        with torch._C._ForceDispatchKeyGuard(*_OUTSIDE), torch.enable_grad():
            l, h = (value.detach().requires_grad_() for value in (logp, entropy))  # noqa: E741
            losses = function(l, h, part)
            if losses.shape != logp.shape or losses.dtype != torch.float32:
                raise ValueError(
                    f"the loss must return one float32 number for each token, {list(logp.shape)}, "
                    f"got {losses.dtype} of shape {list(losses.shape)}"
                )
            found = losses.requires_grad and torch.autograd.grad(
                losses.sum(), (l, h), allow_unused=True
            )
        a, c = found or (None, None)
        losses = losses.detach()
        a = (torch.zeros_like(logp) if a is None else a).masked_fill(
            losses.isnan(), torch.nan
        )  # a clamp would stop it
        token_loss[chunk] = losses
        return a, c

    head, read = Head(weight, bias, temperature, softcap), Values(target, weight.shape[0], numbers)
    result = head_pass(
        resolve(backend, hidden, weight), hidden, head, target, None, coefficients, wants, read
    )
    assert result.has_gradient is not None
    gradients = [hidden.new_empty(0) if d is None else d for d in result[2:5]]
    return (
        token_loss.sum(),
        token_loss,
        result.logp,
        result.entropy,
        result.has_gradient,
        *gradients,
    )


_token_loss = torch.library.custom_op(
    "paw_kernels::token_loss",
    _one_pass,
    mutates_args=(),
    schema=" ".join(_SCHEMA.split()),
    tags=TAGS,
)


@_token_loss.register_fake
def _(hidden, weight, *rest) -> tuple[Tensor, ...]:
    T, wants = hidden.shape[0], rest[-1]
    per_token = (
        *(hidden.new_empty(T, dtype=torch.float32) for _ in range(3)),
        hidden.new_empty(T, dtype=torch.bool),
    )
    shapes, dtype = (hidden.shape, weight.shape, weight.shape[:1]), gradient_dtype(hidden.dtype)
    empty = [
        hidden.new_empty(s, dtype=dtype) if w else hidden.new_empty(0)
        for s, w in zip(shapes, wants, strict=True)
    ]
    return hidden.new_empty((), dtype=torch.float32), *per_token, *empty


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    # Kept as attributes, not saved for backward, so that the first backward can hand them over and
    # let go of them. That makes no reference cycle, because they take no part in autograd.
    ctx.gradients = output[5:]
    ctx.mark_non_differentiable(*output[5:])
    ctx.values, ctx.wants, ctx.dtype = len(inputs[6]), inputs[-1], inputs[0].dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, factor: Tensor, *_: Any) -> tuple[Any, ...]:
    refuse_second_derivatives("token_loss")
    if ctx.gradients is None:
        raise RuntimeError(
            "backward through token_loss a second time; the first needs retain_graph=True"
        )
    gradients = [d if want else None for d, want in zip(ctx.gradients, ctx.wants, strict=True)]
    keep = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
    traced = type(factor) is not Tensor  # a fake or functional tensor has no value to look at
    if keep or traced or factor != 1:
        gradients = [None if d is None else d * factor for d in gradients]
    if not keep:
        ctx.gradients = None
    given = [None if d is None else d.to(ctx.dtype) for d in gradients]
    return *given, None, None, None, [None] * ctx.values, None, None, None, None


_token_loss.register_autograd(_backward, setup_context=_save)
_direct = without_dispatch(_one_pass, _save, _backward)


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    loss: Loss | LossFunction,
    batch: Any,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> TokenLoss:
    """The sum over tokens of loss(logp, entropy, batch), with logp and entropy as `token_stats` has them.

    hidden [T, D], weight [V, D] and bias [V] share one dtype (float32, bfloat16, float16) and
    device; target [T] int64. softcap: see `token_stats`. Logits, statistics and the loss are
    float32. `batch` is a dataclass of what the loss reads: tensors [T] on the same device,
    floating-point ones float32 and finite, or None. The loss is called once a chunk, with an object
    of the same fields cut to the chunk's tokens. Inside `torch.compile` it must be a `Loss`. A NaN
    hidden state makes the loss NaN. No gradient is formed under no_grad or for inputs that require
    none.

    Raises ValueError, naming the argument, for mismatched shapes, dtypes or devices, targets
    outside [0, V), numbers in `batch` that are not finite, a loss of another shape, a temperature
    or softcap that is not positive and finite, a backend that is unknown or cannot run here.
    """
    hidden, weight, bias = check_head(hidden, weight, target, bias, temperature, softcap)
    if not is_dataclass(batch):
        raise ValueError(f"batch must be a dataclass of tensors, got {type(batch).__name__}")
    found = {field.name: getattr(batch, field.name) for field in fields(batch)}
    values = {name: value for name, value in found.items() if value is not None}
    for name, value in values.items():
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        check_tensor(f"batch.{name}", value, [hidden.shape[0]], dtype, hidden.device)
    if not isinstance(loss, Loss):
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "inside torch.compile the loss must be a paw_kernels.Loss, made outside of it"
            )
        loss = Loss(loss)
    grad = torch.is_grad_enabled()
    operator = (
        _direct if unobserved(hidden, weight, bias, target, *values.values()) else _token_loss
    )
    out = operator(
        hidden,
        weight,
        bias,
        target,
        float(temperature),
        None if softcap is None else float(softcap),
        list(values.values()),
        ",".join(name if name in values else f"{name}?" for name in found),
        loss.key,
        backend,
        [grad and t is not None and t.requires_grad for t in (hidden, weight, bias)],
    )
    return TokenLoss(out[0], *(v.detach() for v in out[1:5]))
