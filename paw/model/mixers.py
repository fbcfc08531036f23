"""Passes packed rows side by side to layers that mix tokens by recurrence or convolution.

Such layers do not know where rows end.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paw.model.attention import token_mixers


def separate_rows(layers: Iterable[nn.Module]) -> None:
    """Make every token mixer in these decoder layers see each row alone.

    Hooks on the modules do this, and a deep copy of the model keeps them. A decoder layer hands the
    bounds down each time it runs, including when it is recomputed, because not every model passes
    them on.
    """
    for layer in layers:
        mixers = token_mixers(layer)
        if not mixers:
            continue
        layer.register_forward_pre_hook(_hand_down, with_kwargs=True)
        for mixer in mixers:
            mixer.register_forward_pre_hook(_lay_side_by_side, with_kwargs=True)
            mixer.register_forward_hook(_lay_one_after_another)


def _hand_down(layer: nn.Module, args: tuple, options: dict[str, Any]) -> None:
    for mixer in token_mixers(layer):
        mixer.packed = options.get("packed")


@torch.compiler.disable
def _lay_side_by_side(
    mixer: Any, args: tuple, options: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Return a mixer's arguments with hidden states [rows, longest, D] in place of [1, T, D]."""
    if mixer.packed is None:
        return None
    if args:
        hidden = mixer.packed.side_by_side(args[0].squeeze(0))
        return (hidden, *args[1:]), options
    hidden = mixer.packed.side_by_side(options["hidden_states"].squeeze(0))
    return args, options | {"hidden_states": hidden}


@torch.compiler.disable
def _lay_one_after_another(mixer: Any, args: tuple, output: Any) -> Any:
    """Return a mixer's output with hidden states as [1, T, D] again."""
    if mixer.packed is None:
        return None
    if isinstance(output, tuple):
        hidden, *others = output
        return (mixer.packed.one_after_another(hidden).unsqueeze(0), *others)
    return mixer.packed.one_after_another(output).unsqueeze(0)
