"""A policy's weights in the form that engines take."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from paw.model import lora
from paw.model.policy import full_parameters


class Weights:
    """Every parameter of a Hugging Face causal LM, in an engine's form, with LoRA adapters merged.

    With `dtype`, matrices are cast to it before they are gathered. If the model is sharded, every
    rank must make each pass.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint_names: bool,
        *,
        merge: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._model = model
        self._checkpoint_names = checkpoint_names
        self._merge = merge
        self._dtype = dtype
        self.taken = 0
        """Number of parameters that the newest pass has yielded."""
        self.last_taken = ""
        """The name of the last of them."""
        self.exhausted = False
        """Whether that pass reached the end."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor), gathered a bucket at a time."""
        self.taken = 0
        self.exhausted = False
        parameters = full_parameters(self._model, merge=self._merge, dtype=self._dtype)
        for name, tensor in self._named(parameters):
            self.taken += 1
            self.last_taken = name
            yield name, tensor
        self.exhausted = True

    @property
    def base(self) -> "Weights":
        """Return the same parameters without adapters."""
        return Weights(self._model, self._checkpoint_names, merge=False, dtype=self._dtype)

    @property
    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (peft's name, full tensor) of each LoRA parameter, for one pass."""
        return lora.adapters(self._model)

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return (name, full shape) of each parameter, without gathering."""
        named = self._named(self._empty_parameters())
        return [(name, tuple(tensor.shape)) for name, tensor in named]

    def _empty_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor without data) of each parameter except the adapters'.

        Names are those from before peft wrapped layers.
        """
        for name, tensor in self._model.named_parameters(remove_duplicate=False):
            if ".lora_" not in name:
                yield name.replace(".base_layer.", "."), torch.empty(tensor.shape, device="meta")

    def _named(self, parameters: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters under the names that the engine expects."""
        if not self._checkpoint_names:
            return parameters
        return checkpoint_parameters(self._model, parameters)


def checkpoint_parameters(
    model: nn.Module, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters under the names in the model's files.

    transformers keeps all experts of a layer in one tensor. The files have one tensor per expert.
    """
    for name, tensor in named:
        if tensor.dim() == 3:
            any_model: Any = model
            yield from revert_weight_conversion(any_model, {name: tensor}).items()
        else:
            yield name, tensor
