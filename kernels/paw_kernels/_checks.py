"""Argument checks of the public functions.

Each error names the argument and what it should have been.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from paw_kernels._native import are_finite, in_range

TAGS = (torch.Tag.cudagraph_unsafe,)
"""Of operators that wait for the device: torch.compile leaves them out of CUDA graphs."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Shapes, dtypes and devices of a head call; reads no values, so it never waits for the device.

    Answers hidden, weight and bias, of one dtype: under autocast several become its own, as in
    nn.functional.linear.
    """
    hidden, weight, bias = _autocast(hidden, weight, bias)
    _refuse_forward_mode(hidden, weight, bias)
    if hidden.dim() != 2:
        raise ValueError(f"hidden must be [T, D], got shape {list(hidden.shape)}")
    if hidden.dtype not in _DTYPES:
        raise ValueError(f"hidden must be float32, bfloat16 or float16, got {hidden.dtype}")
    T, D = hidden.shape
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != D:
        raise ValueError(
            f"weight must be [V, D] with V > 0 and D = {D} as in hidden, got shape {list(weight.shape)}"
        )
    check_tensor("weight", weight, list(weight.shape), hidden.dtype, hidden.device)
    check_tensor("target", target, [T], torch.int64, hidden.device)
    if bias is not None:
        check_tensor("bias", bias, [weight.shape[0]], hidden.dtype, hidden.device)
    # Comparisons, because torch.compile makes a symbol of a float that changes.
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be None, or positive and finite, got {softcap}")
    return hidden, weight, bias


def _autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    dtypes = {t.dtype for t in (hidden, weight, bias) if t is not None}
    device = hidden.device.type
    if (
        len(dtypes) == 1
        or not dtypes <= set(_DTYPES)
        or not torch.amp.is_autocast_available(device)
    ):
        return hidden, weight, bias
    if not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    if torch.compiler.is_compiling():
        return
    if any(t is not None and unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError("the fused head has no forward-mode derivatives (jvp); use backward")


def unobserved(*tensors: Tensor | None) -> bool:
    """Whether no subclass, trace, mode or transform would see an operator on these: its dispatch may be left out."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
        return False
    return all(type(t) in (Tensor, torch.nn.Parameter, type(None)) for t in tensors)


def without_dispatch(
    one_pass: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]
) -> Any:
    """An operator's function, context and backward pass without its dispatch, which takes as long
    as a small head's matmuls. Its first three inputs may have gradients."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output, ctx.others = one_pass(*inputs), len(inputs) - 3
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return *backward(ctx, *gradients)[:3], *[None] * ctx.others

    return Direct.apply


def refuse_second_derivatives(name: str) -> None:
    """To be called in a backward pass, where gradients are recorded only on the way to a second derivative."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivatives; backward with create_graph=True would leave them out"
        )


def check_tensor(
    name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    if list(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} as hidden is, got {tensor.device}")


class Values:
    """Numbers that the host has yet to read off the device; what is wrong with a call's values comes with the first."""

    def __init__(
        self, target: Tensor, vocabulary: int, batch: Sequence[tuple[str, Tensor]] = ()
    ) -> None:
        self.target = target.contiguous()
        """In range, so that kernels may run before anything is read."""
        self._messages, self._pending = [], []
        if in_range(target, vocabulary) and all(are_finite(value) for _, value in batch):
            return
        self.target = target.clamp(0, vocabulary - 1)
        self._messages = [f"target must be in [0, {vocabulary})"]
        self._pending = [(self.target != target).any().reshape(1)]
        if batch:
            self._messages += [f"batch.{name} must be finite" for name, _ in batch]
            self._pending.append(
                torch.stack([value for _, value in batch]).mul(0).sum(1)
            )  # 0, else NaN

    def read(self, *more: Tensor) -> list[float]:
        """The numbers of `more` (one-dimensional tensors, exact in float32), in one copy.

        Raises ValueError, the first time, for targets outside [0, V) and for tensors of `batch`
        that are not finite.
        """
        if not self._pending and not more:
            return []
        parts, checks = [*self._pending, *more], len(self._messages)
        found = (parts[0] if len(parts) == 1 else torch.cat(parts)).tolist()
        for message, flag in zip(self._messages, found, strict=False):
            if flag:  # as NaN does
                raise ValueError(message)
        self._pending, self._messages = [], []
        return found[checks:]
