"""Gives bf16 one meaning for any number of ranks: every module sees its parameters as bf16.

Nothing else is cast. With several ranks, FSDP2's MixedPrecisionPolicy does this. vLLM does the
same. Parameters that are stored in float32 (AdamW's, LoRA's adapters) stay float32 for the
optimizer, and so do their gradients. With one rank, a decoder layer has bf16 copies of them while
it runs, in the forward pass and, if it is checkpointed, again in the backward pass. autocast would
keep the copies of all layers, and would keep the residual stream in float32.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def parameters_as(dtype: torch.dtype, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Replace the modules' own floating-point parameters by copies in `dtype` in this block.

    Parameters that already have this dtype are not replaced. Gradients flow through the copies. A
    shared parameter has one copy.
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
    """Make the `layers` and all other modules of `lm` run with their parameters in `dtype`.

    Hooks do this. They stay outside the compiled code of a layer and inside the checkpointed
    region.
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
    """Run the modules that `run_in` has prepared in a different dtype in this block."""
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

    # A hook gets the called module, which may be a deep copy of the one the hook was made for.
    def enter(called: Any, *_: Any) -> None:
        modules = [called]
        if with_submodules:
            modules = called.modules()
        casting.enter_context(parameters_as(called._runs_in, modules))

    def leave(*_: Any) -> None:
        casting.close()

    module.register_forward_pre_hook(enter)
    # always_call is needed because an exception ends the recomputation of a checkpointed layer
    # early.
    module.register_forward_hook(leave, always_call=True)
