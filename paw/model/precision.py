"""One definition of bf16 for any number of ranks: every module sees its parameters as bf16, and nothing else is cast.

So does FSDP2's MixedPrecisionPolicy in several ranks, and vLLM. Parameters that are stored in
float32 (AdamW's, LoRA's adapters) keep that for the optimizer and get their gradients in it. In one
rank a decoder layer has copies of them while it runs, forward and again in the backward pass where
it is checkpointed; autocast would keep those of all layers, and a residual stream of float32.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def parameters_as(dtype: torch.dtype, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Copies in place of what the modules themselves hold in another floating dtype; gradients flow through them."""
    held = [
        (module._parameters, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype
    ]
    copies: dict[Any, Any] = {
        parameter: parameter.to(dtype) for parameter in {item[2]: None for item in held}
    }
    for parameters, name, parameter in held:
        parameters[name] = copies[parameter]
    try:
        yield
    finally:
        for parameters, name, parameter in held:
            parameters[name] = parameter


def run_in(dtype: torch.dtype, lm: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Have each of the `layers`, and whatever else in `lm` holds parameters, run with them as `dtype`.

    By hooks, which stay around what torch.compile makes of a layer, and inside what is
    checkpointed.
    """
    layers = list(layers)
    inside = {part for layer in layers for part in layer.modules()}
    for layer in layers:
        _hook(layer, dtype, whole=True)
    for part in lm.modules():
        if part._parameters and part not in inside:
            _hook(part, dtype, whole=False)


@contextmanager
def running_in(dtype: torch.dtype, lm: nn.Module) -> Iterator[None]:
    """Another dtype meanwhile for what `run_in` was told of."""
    before: dict[Any, torch.dtype] = {
        part: part._runs_in for part in lm.modules() if hasattr(part, "_runs_in")
    }  # type: ignore[misc]
    for part in before:
        part._runs_in = dtype
    try:
        yield
    finally:
        for part, own in before.items():
            part._runs_in = own


def _hook(unit: Any, dtype: torch.dtype, *, whole: bool) -> None:
    unit._runs_in, entered = dtype, ExitStack()

    def enter(
        unit: Any, *_: Any
    ) -> None:  # the unit that is called may be a deep copy of the one it was made for
        entered.enter_context(parameters_as(unit._runs_in, unit.modules() if whole else [unit]))

    unit.register_forward_pre_hook(enter)
    unit.register_forward_hook(
        lambda *_: entered.close(), always_call=True
    )  # recomputing stops by an exception
