"""Weights from the trainer to the engine, and the check that they arrived."""

from collections.abc import Iterator, Sequence
from itertools import chain, compress

import torch
from torch import Tensor, nn

from paw.errors import UserError
from paw.model.policy import full_parameters
from paw.rollout.engines.base import Engine

LIMIT, TOLERATED = 0.5, 0.05
"""Nats that a token's two log-probs may differ by, and the share of tokens that may be beyond it. Rounding costs up to
1e-6 in fp32, 0.008 in bf16 (0.14 with sharp weights; small models): the odd token. Wrong weights put many there."""


class StaleWeightsError(UserError):
    """The sampler's log-probabilities are not those of the trainer's weights."""


class Weights:
    """Every parameter of a Hugging Face causal LM as an engine takes them: each pass is a collective call of all
    ranks where the model is sharded."""

    def __init__(self, model: nn.Module, checkpoint_names: bool) -> None:
        self._model, self._checkpoint_names = model, checkpoint_names

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor), one gathered at a time."""
        return self._named(full_parameters(self._model))

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and full shape of each, without gathering."""
        every = self._model.named_parameters(remove_duplicate=False)
        empty = ((name, torch.empty(tensor.shape, device="meta")) for name, tensor in every if ".lora_" not in name)
        named = self._named((name.replace(".base_layer.", "."), tensor) for name, tensor in empty)
        return [(name, tuple(tensor.shape)) for name, tensor in named]

    def _named(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        if not self._checkpoint_names:
            return named
        from paw.rollout.engines.vllm import checkpoint_parameters

        return checkpoint_parameters(self._model, named)


def push_weights(model: nn.Module, engine: Engine, version: int) -> None:
    """Hand every parameter of a Hugging Face causal LM to `engine`; on FSDP2 a collective call of all ranks."""
    engine.sync(Weights(model, engine.checkpoint_names), version)


def sampler_mismatch(
    trainer: Sequence[list[float]],
    sampled: Sequence[list[float]],
    current: Sequence[list[bool]] | None = None,
    what: str = "log-probs",
) -> dict[str, float]:
    """health/sampler_mismatch (largest) and health/sampler_mismatch_mean, nats: how far the trainer's log-probs of some
    responses are from the sampler's. Of the tokens that are `current`, sampled from these weights; {} for none.

    StaleWeightsError when more than `TOLERATED` are beyond `LIMIT`, or not finite.
    """
    pairs = zip(chain(*trainer), chain(*sampled), strict=True)
    distances = [abs(a - b) for a, b in (compress(pairs, chain(*current)) if current is not None else pairs)]
    if not distances:
        return {}
    off = sum(not d <= LIMIT for d in distances) / len(distances)  # a NaN is off as well
    largest, mean = max(distances), sum(distances) / len(distances)
    if off > TOLERATED:
        raise StaleWeightsError(
            f"stale weights: the sampler's {what} differ from the trainer's by more than {LIMIT} nats on {off:.0%}"
            f" of {len(distances)} tokens (mean {mean:.3g}, max {largest:.3g}); the engine does not hold the"
            " weights it was sent"
        )
    return {"health/sampler_mismatch": largest, "health/sampler_mismatch_mean": mean}
