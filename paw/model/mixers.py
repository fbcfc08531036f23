"""Layers that mix tokens by recurrence or convolution, which know no bounds of packed rows: they get each row alone."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paw.model.attention import token_mixers


def separate_rows(layers: Iterable[nn.Module]) -> None:
    """By hooks on the modules themselves, which a deep copy of the model keeps: a decoder layer
    hands the bounds down, each time it runs (when it is recomputed as well), since not every model
    passes them on.
    """
    for layer in layers:
        if mixers := token_mixers(layer):
            layer.register_forward_pre_hook(_hand_down, with_kwargs=True)
            for mixer in mixers:
                mixer.register_forward_pre_hook(_part, with_kwargs=True)
                mixer.register_forward_hook(_join)


def _hand_down(layer: nn.Module, args: tuple, options: dict[str, Any]) -> None:
    for mixer in token_mixers(layer):
        mixer.packed = options.get("packed")


@torch.compiler.disable
def _part(mixer: Any, args: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    if mixer.packed is None:
        return None
    if args:
        return (mixer.packed.side_by_side(args[0].squeeze(0)), *args[1:]), options
    return args, options | {
        "hidden_states": mixer.packed.side_by_side(options["hidden_states"].squeeze(0))
    }


@torch.compiler.disable
def _join(mixer: Any, args: tuple, output: Any) -> Any:
    if mixer.packed is None:
        return None
    first, *rest = output if isinstance(output, tuple) else (output,)
    first = mixer.packed.one_after_another(first).unsqueeze(0)
    return (first, *rest) if isinstance(output, tuple) else first
