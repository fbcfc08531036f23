"""Argument checks of the public functions.

Each error names the argument and says what it should have been.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from paw_kernels._native import are_finite, in_range

TAGS = (torch.Tag.cudagraph_unsafe,)
"""Tags of operators that wait for the device. torch.compile leaves these out of CUDA graphs."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check shapes, dtypes and devices of a head call, without waiting for the device.

    Returns hidden, weight and bias in one dtype. Under autocast, different dtypes become autocast's
    own, as in nn.functional.linear. Raises ValueError naming the argument.
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
    # Use comparisons, because torch.compile turns a float that changes into a symbol.
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be None, or positive and finite, got {softcap}")
    return hidden, weight, bias


def _autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    device = hidden.device.type
    if len(dtypes) == 1 or not dtypes <= set(_DTYPES):
        return hidden, weight, bias
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    if bias is not None:
        bias = bias.to(dtype)
    return hidden.to(dtype), weight.to(dtype), bias


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    if torch.compiler.is_compiling():
        return
    if any(t is not None and unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError("the fused head has no forward-mode derivatives (jvp); use backward")


def unobserved(*tensors: Tensor | None) -> bool:
    """Whether an operator's dispatch may be skipped for these tensors, because no subclass, trace,
    mode or transform would see it."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
        return False
    return all(type(t) in (Tensor, torch.nn.Parameter, type(None)) for t in tensors)


def without_dispatch(
    one_pass: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]
) -> Any:
    """Wrap an operator's function, context and backward pass for calls without the dispatcher.

    Dispatch takes as long as the matmuls of a small head. Only the first three inputs may have
    gradients.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = one_pass(*inputs)
            ctx.input_count = len(inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            d_hidden, d_weight, d_bias = backward(ctx, *gradients)[:3]
            return d_hidden, d_weight, d_bias, *[None] * (ctx.input_count - 3)

    return Direct.apply


def refuse_second_derivatives(name: str) -> None:
    """Raise RuntimeError if gradients are recorded: in a backward pass with create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivatives; backward with create_graph=True would omit them"
        )


def check_tensor(
    name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    if list(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like hidden, got {tensor.device}")


class Values:
    """Checks of a call's values. The host reads their results together with the first numbers that
    it needs anyway."""

    def __init__(
        self, target: Tensor, vocabulary: int, batch: Sequence[tuple[str, Tensor]] = ()
    ) -> None:
        self.target = target.contiguous()
        """Targets clamped to [0, vocabulary), so that kernels can run before checks are read."""
        self._messages: list[str] = []
        """The error of each check, raised if its number is not 0."""
        self._pending: list[Tensor] = []
        """The numbers of the checks, each [1] or [len(batch)]."""

        if in_range(target, vocabulary) and all(are_finite(value) for _, value in batch):
            return
        self.target = target.clamp(0, vocabulary - 1)
        self._messages = [f"target must be in [0, {vocabulary})"]
        self._pending = [(self.target != target).any().reshape(1)]
        if batch:
            self._messages += [f"batch.{name} must be finite" for name, _ in batch]
            stacked = torch.stack([value for _, value in batch])
            self._pending.append(stacked.mul(0).sum(1))  # 0 if all are finite, else NaN

    def read(self, *more: Tensor) -> list[float]:
        """Read the numbers of `more` (one-dimensional tensors, exact in float32) in one copy.

        On the first call, raises ValueError if targets are outside [0, V) or tensors of `batch` are
        not finite.
        """
        if not self._pending and not more:
            return []
        parts = [*self._pending, *more]
        joined = parts[0]
        if len(parts) > 1:
            joined = torch.cat(parts)
        numbers = joined.tolist()
        check_count = len(self._messages)
        for message, number in zip(self._messages, numbers[:check_count], strict=True):
            if number:  # NaN is also true
                raise ValueError(message)

        self._pending = []
        self._messages = []
        return numbers[check_count:]
