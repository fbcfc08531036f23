"""One definition of bf16 for any number of ranks: every module sees its parameters as bf16.

Nothing else is cast. With several ranks FSDP2's MixedPrecisionPolicy does this, and so does vLLM.
Parameters that are stored in float32 (AdamW's, LoRA's adapters) stay float32 for the optimizer, and
so do their gradients. With one rank, a decoder layer has bf16 copies of them while it runs: in the
forward pass, and again in the backward pass if it is checkpointed. autocast would keep the copies
of all layers, and a residual stream of float32.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def parameters_as(dtype: torch.dtype, modules: Iterable[nn.Module]) -> Iterator[None]:
    """In this block the modules' own floating-point parameters are copies in `dtype`.

    Those that have this dtype stay. Gradients flow through the copies. A shared parameter has one
    copy.
    """
    originals: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            originals.append((module._parameters, name, parameter))
    copies: dict[nn.Parameter, Tensor] = {}
    for _, _, parameter in originals:
        if parameter not in copies:
            copies[parameter] = parameter.to(dtype)

    for parameters, name, parameter in originals:
        parameters[name] = copies[parameter]
    try:
        yield
    finally:
        for parameters, name, parameter in originals:
            parameters[name] = parameter


def run_in(dtype: torch.dtype, lm: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Make the `layers`, and all other modules of `lm`, run with their parameters as `dtype`.

    This is done by hooks, which stay outside what torch.compile makes of a layer, and inside what
    is checkpointed.
    """
    in_layers: set[nn.Module] = set()
    for layer in layers:
        in_layers.update(layer.modules())
        _add_hooks(layer, dtype, with_submodules=True)
    for module in lm.modules():
        if module._parameters and module not in in_layers:
            _add_hooks(module, dtype, with_submodules=False)


@contextmanager
def running_in(dtype: torch.dtype, lm: nn.Module) -> Iterator[None]:
    """In this block the modules that `run_in` has prepared run in another dtype."""
    usual_dtypes: dict[Any, torch.dtype] = {}
    for module in lm.modules():
        if hasattr(module, "_runs_in"):
            usual_dtypes[module] = module._runs_in  # type: ignore[assignment]
    for module in usual_dtypes:
        module._runs_in = dtype
    try:
        yield
    finally:
        for module, usual_dtype in usual_dtypes.items():
            module._runs_in = usual_dtype


def _add_hooks(module: nn.Module, dtype: torch.dtype, *, with_submodules: bool) -> None:
    """Make a module run with its parameters in `dtype`, which `module._runs_in` can change."""
    module._runs_in = dtype  # type: ignore[assignment]
    casting = ExitStack()

    # A hook gets the module that is called, which may be a deep copy of the one it was made for.
    def enter(called: Any, *_: Any) -> None:
        modules = [called]
        if with_submodules:
            modules = called.modules()
        casting.enter_context(parameters_as(called._runs_in, modules))

    def leave(*_: Any) -> None:
        casting.close()

    module.register_forward_pre_hook(enter)
    # always_call: when a checkpointed layer is recomputed, an exception ends it early.
    module.register_forward_hook(leave, always_call=True)
