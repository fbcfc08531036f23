"""A loss of packed tokens in one pass through the head.

Gradients are formed while a chunk's logits exist. A loss is a function of each token's
log-probability l and entropy H, written in plain torch:

    def cross_entropy(logp, entropy, batch):  # [n], [n], the tensors of `batch` at these n tokens -> [n]
        return -batch.weight * logp

Autograd on vectors of n numbers gives its derivatives a = dL/dl and c = dL/dH. The head needs only
these:

    dL/dz_j = a (1[j = y] - p_j) - c p_j (log p_j + H)

A pass costs 1 + 2f matmuls of [T, D] by [V, D], where f is the share of tokens with a gradient.
Masked observation tokens, clipped actions and zero weights drop out before the two gradient
matmuls. Backward only returns the gradients (scaled, if the loss was). Memory: the gradients of
hidden [T, D] and weight [V, D] are kept from forward to backward. A forward of several chunks also
needs a float32 sum of the latter.
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
from paw_kernels._head import Head, gradient_dtype, head_pass, rows_of

LossFunction = Callable[[Tensor, Tensor, Any], Tensor]
"""(logp [n], entropy [n], batch) -> the loss of each token [n] float32, including weights and
normalisers.

Each token's loss may depend only on its own log-probability and entropy, because the head cuts
tokens into chunks. Derivatives must be finite where log p is -inf.
"""

_losses: "WeakValueDictionary[str, Loss]" = WeakValueDictionary()
"""All existing losses, by key. An operator takes a key instead of a function."""
_loss_numbers = count()

_OUTSIDE = (
    torch._C._dispatch_tls_local_include_set(),
    torch._C._dispatch_tls_local_exclude_set(),
)
"""The dispatch keys (included, excluded) outside any operator."""


class Loss:
    """A loss function that `torch.compile` can use too. It is also a decorator.

    Make it once, outside the compiled code.
    """

    def __init__(self, function: LossFunction) -> None:
        self.function = function
        self.key = str(next(_loss_numbers))
        _losses[self.key] = self

    def __call__(self, logp: Tensor, entropy: Tensor, batch: Any) -> Tensor:
        return self.function(logp, entropy, batch)


class TokenLoss(NamedTuple):
    """The loss and the results of each token [T], which are detached and float32 unless noted."""

    loss: Tensor
    """Scalar, the sum over tokens. Differentiable in hidden, weight and bias."""
    token_loss: Tensor
    logp: Tensor
    entropy: Tensor
    has_gradient: Tensor
    """bool: tokens whose gradient is not zero. Their share is f."""


_SCHEMA = """(
    Tensor hidden, Tensor weight, Tensor? bias, Tensor target, float temperature, float? softcap,
    Tensor[] values, str names, str loss, str backend, bool[] wants
) -> (
    Tensor loss, Tensor token_loss, Tensor logp, Tensor entropy, Tensor has_gradient,
    Tensor d_hidden, Tensor d_weight, Tensor d_bias
)"""
"""The fields of TokenLoss, then the gradients (of `gradient_dtype`, empty unless in `wants`).

Operators accept neither functions nor dataclasses. So `loss` is the key of a `Loss`, and `names`
lists the fields of the batch, separated by commas. "x" takes the next tensor of `values`, and "x?"
means x = None.
"""


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
    """Implement the operator `_SCHEMA`."""
    loss_function = _losses[loss]
    batch = _batch_fields(names, values)
    token_loss = hidden.new_empty(hidden.shape[0], dtype=torch.float32)

    def coefficients(chunk: slice, logp: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        chunk_batch = SimpleNamespace(
            **{name: rows_of(value, chunk) for name, value in batch.items()}
        )
        token_loss[chunk], a, c = _loss_derivatives(loss_function, logp, entropy, chunk_batch)
        return a, c

    result = head_pass(
        resolve(backend, hidden, weight),
        hidden,
        Head(weight, bias, temperature, softcap),
        target,
        index=None,
        coefficients=coefficients,
        wants=wants,
        values=Values(target, weight.shape[0], _numbers(batch)),
    )

    assert result.has_gradient is not None
    gradients = [
        hidden.new_empty(0) if gradient is None else gradient
        for gradient in (result.d_hidden, result.d_weight, result.d_bias)
    ]
    return (
        token_loss.sum(),
        token_loss,
        result.logp,
        result.entropy,
        result.has_gradient,
        *gradients,
    )


def _batch_fields(names: str, values: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Return the batch by field, from `names` and `values` as in `_SCHEMA`."""
    batch: dict[str, Tensor | None] = {}
    if not names:
        return batch
    tensors = iter(values)
    for name in names.split(","):
        if name.endswith("?"):
            batch[name[:-1]] = None
        else:
            batch[name] = next(tensors)
    return batch


def _numbers(batch: dict[str, Tensor | None]) -> list[tuple[str, Tensor]]:
    """Return the floating-point fields of the batch, with their names."""
    numbers = []
    for name, value in batch.items():
        if value is not None and value.is_floating_point():
            numbers.append((name, value))
    return numbers


def _loss_derivatives(
    loss: LossFunction, logp: Tensor, entropy: Tensor, batch: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the losses of a chunk's tokens, a = dL/dlogp and c = dL/dentropy.

    All are [n] float32, with c None for all zeros. Raises ValueError if the loss does not return
    one float32 number for each token.
    """
    # An operator runs below autograd and below any mode that sees it. This undoes that.
    with torch._C._ForceDispatchKeyGuard(*_OUTSIDE), torch.enable_grad():
        logp_leaf = logp.detach().requires_grad_()
        entropy_leaf = entropy.detach().requires_grad_()
        losses = loss(logp_leaf, entropy_leaf, batch)
        if losses.shape != logp.shape or losses.dtype != torch.float32:
            raise ValueError(
                f"the loss must return one float32 number for each token, {list(logp.shape)}, "
                f"got {losses.dtype} of shape {list(losses.shape)}"
            )
        a = None
        c = None
        if losses.requires_grad:
            leaves = (logp_leaf, entropy_leaf)
            a, c = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)

    losses = losses.detach()
    if a is None:
        a = torch.zeros_like(logp)
    # A clamp in the loss would keep a NaN from reaching the gradient.
    a = a.masked_fill(losses.isnan(), torch.nan)
    return losses, a, c


_token_loss = torch.library.custom_op(
    "paw_kernels::token_loss",
    _one_pass,
    mutates_args=(),
    schema=" ".join(_SCHEMA.split()),
    tags=TAGS,
)


@_token_loss.register_fake
def _(hidden, weight, *rest) -> tuple[Tensor, ...]:
    T = hidden.shape[0]
    loss = hidden.new_empty((), dtype=torch.float32)
    token_loss = hidden.new_empty(T, dtype=torch.float32)
    logp = hidden.new_empty(T, dtype=torch.float32)
    entropy = hidden.new_empty(T, dtype=torch.float32)
    has_gradient = hidden.new_empty(T, dtype=torch.bool)

    wants = rest[-1]
    gradients = []
    for shape, wanted in zip((hidden.shape, weight.shape, weight.shape[:1]), wants, strict=True):
        if wanted:
            gradients.append(hidden.new_empty(shape, dtype=gradient_dtype(hidden.dtype)))
        else:
            gradients.append(hidden.new_empty(0))
    return loss, token_loss, logp, entropy, has_gradient, *gradients


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    # They are kept as attributes, not saved for backward, so that the first backward can hand them
    # over and release them. This makes no reference cycle, because they are not part of autograd.
    ctx.gradients = output[5:]
    ctx.mark_non_differentiable(*output[5:])
    ctx.dtype = inputs[0].dtype
    ctx.value_count = len(inputs[6])
    ctx.wants = inputs[-1]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, factor: Tensor, *_: Any) -> tuple[Any, ...]:
    refuse_second_derivatives("token_loss")
    if ctx.gradients is None:
        raise RuntimeError(
            "backward through token_loss a second time; the first needs retain_graph=True"
        )
    keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
    traced = type(factor) is not Tensor  # a fake or functional tensor has no value to read
    scaled = keep_graph or traced or bool(factor != 1)  # one read, not one for each gradient

    gradients = []
    for gradient, wanted in zip(ctx.gradients, ctx.wants, strict=True):
        if not wanted:
            gradients.append(None)
        elif scaled:
            gradients.append((gradient * factor).to(ctx.dtype))
        else:
            gradients.append(gradient.to(ctx.dtype))
    if not keep_graph:
        ctx.gradients = None

    # First the gradients of hidden, weight and bias, then of target, temperature, softcap, values,
    # names, loss, backend and wants.
    return *gradients, None, None, None, [None] * ctx.value_count, None, None, None, None


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
    """Return the sum over tokens of loss(logp, entropy, batch).

    logp and entropy are as in `token_stats`. hidden [T, D], weight [V, D] and bias [V] share one
    dtype (float32, bfloat16, float16) and device. target is [T] int64. softcap: see `token_stats`.
    Logits, statistics and the loss are float32. `batch` is a dataclass with the data that the loss
    reads. Its fields are None or tensors [T] on the same device, and floating-point ones must be
    float32 and finite. The loss is called once per chunk, with an object of the same fields cut to
    the chunk's tokens. Inside `torch.compile` it must be a `Loss`. A NaN hidden state makes the
    loss NaN. No gradient is formed under no_grad or for inputs that require none.

    Raises ValueError, naming the argument, for mismatched shapes, dtypes or devices, targets
    outside [0, V), numbers in `batch` that are not finite, a loss of the wrong shape, a temperature
    or softcap that is not positive and finite, or a backend that is unknown or cannot run here.
    """
    hidden, weight, bias = check_head(hidden, weight, target, bias, temperature, softcap)
    names, values = _batch_tensors(batch, hidden)
    registered = _registered(loss)
    wants = [_wants_gradient(tensor) for tensor in (hidden, weight, bias)]
    operator = _token_loss
    if unobserved(hidden, weight, bias, target, *values):
        operator = _direct
    if softcap is not None:
        softcap = float(softcap)
    outputs = operator(
        hidden,
        weight,
        bias,
        target,
        float(temperature),
        softcap,
        values,
        names,
        registered.key,
        backend,
        wants,
    )
    per_token = (output.detach() for output in outputs[1:5])
    return TokenLoss(outputs[0], *per_token)


def _wants_gradient(tensor: Tensor | None) -> bool:
    return torch.is_grad_enabled() and tensor is not None and tensor.requires_grad


def _registered(loss: Loss | LossFunction) -> Loss:
    """Return the loss as a `Loss`, whose key the operator takes.

    Raises RuntimeError for a function inside `torch.compile`.
    """
    if isinstance(loss, Loss):
        return loss
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "inside torch.compile the loss must be a paw_kernels.Loss that was made outside it"
        )
    return Loss(loss)


def _batch_tensors(batch: Any, hidden: Tensor) -> tuple[str, list[Tensor]]:
    """Return `names` and `values` of `_SCHEMA`, checked. `_batch_fields` is the inverse."""
    if not is_dataclass(batch):
        raise ValueError(f"batch must be a dataclass of tensors, got {type(batch).__name__}")
    names: list[str] = []
    values: list[Tensor] = []
    for field in fields(batch):
        value = getattr(batch, field.name)
        if value is None:
            names.append(f"{field.name}?")
            continue
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        check_tensor(f"batch.{field.name}", value, [hidden.shape[0]], dtype, hidden.device)
        values.append(value)
        names.append(field.name)
    return ",".join(names), values
