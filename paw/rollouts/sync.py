"""Weights from the trainer to the engine, and the check that they arrived."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from paw.errors import UserError
from paw.model.policy import full_parameters
from paw.rollouts.engines.base import Engine
from paw.types import Sample

LIMIT, TOLERATED = 0.5, 0.05
"""Nats that a token's two log-probs may differ by, and the share of tokens that may be beyond it. Rounding costs up to
1e-6 in fp32, 0.008 in bf16 (0.14 with sharp weights; small models): the odd token. Wrong weights put many there."""


class StaleWeightsError(UserError):
    """The sampler's log-probabilities are not those of the trainer's weights. `servers`: of whose tokens."""

    def __init__(self, message: str, servers: Sequence[str]) -> None:
        super().__init__(message)
        self.servers = servers


class Weights:
    """Every parameter of a Hugging Face causal LM as an engine takes them, LoRA adapters merged: each pass is a
    collective call of all ranks where the model is sharded."""

    def __init__(self, model: nn.Module, checkpoint_names: bool, merge: bool = True) -> None:
        self._model, self._checkpoint_names, self._merge = model, checkpoint_names, merge

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor), one gathered at a time."""
        return self._named(full_parameters(self._model, merge=self._merge))

    @property
    def base(self) -> "Weights":
        """The same without adapters."""
        return Weights(self._model, self._checkpoint_names, merge=False)

    @property
    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """(peft's name, full tensor) of LoRA's, for one pass."""
        from paw.model.lora import adapters

        return adapters(self._model)

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and full shape of each, without gathering."""
        every = self._model.named_parameters(remove_duplicate=False)
        empty = ((name, torch.empty(tensor.shape, device="meta")) for name, tensor in every if ".lora_" not in name)
        named = self._named((name.replace(".base_layer.", "."), tensor) for name, tensor in empty)
        return [(name, tuple(tensor.shape)) for name, tensor in named]

    def _named(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        if not self._checkpoint_names:
            return named
        from paw.rollouts.engines.vllm import checkpoint_parameters

        return checkpoint_parameters(self._model, named)


def push_weights(model: nn.Module, engine: Engine, version: int) -> None:
    """Hand every parameter of a Hugging Face causal LM to `engine`; on FSDP2 a collective call of all ranks."""
    engine.sync(Weights(model, engine.checkpoint_names), version)


def sampled_by(samples: Sequence[Sample], version: int) -> list[list[str | None]]:
    """Which server sampled each response token, "" where there are none; None for tokens of other weights."""
    return [[sample.server if made == version else None for made in sample.versions] for sample in samples]


def sampler_mismatch(
    trainer: Sequence[list[float]],
    sampled: Sequence[list[float]],
    servers: Sequence[Sequence[str | None]] | None = None,
    what: str = "log-probs",
) -> dict[str, float]:
    """health/sampler_mismatch (largest) and health/sampler_mismatch_mean, nats: how far the trainer's log-probs of some
    responses are from the sampler's. `servers`: who sampled each token, those of None are left out; {} for none.

    StaleWeightsError when more than `TOLERATED` of a server's are beyond `LIMIT`, or not finite.
    """
    of = chain(*servers) if servers is not None else ("" for part in trainer for _ in part)
    distances: dict[str, list[float]] = defaultdict(list)
    for ours, theirs, server in zip(chain(*trainer), chain(*sampled), of, strict=True):
        if server is not None:
            distances[server].append(abs(ours - theirs))
    if not distances:
        return {}
    off = {server: sum(not d <= LIMIT for d in found) / len(found) for server, found in distances.items()}  # NaN too
    wrong = [server for server, share in sorted(off.items()) if share > TOLERATED]
    every = list(chain(*(distances[server] for server in wrong or distances)))
    largest, mean = max(every), sum(every) / len(every)
    if wrong:
        where = ", ".join(f"{off[url]:.0%} of {len(distances[url])} tokens" + (url and f" of {url}") for url in wrong)
        raise StaleWeightsError(
            f"stale weights: the sampler's {what} differ from the trainer's by more than {LIMIT} nats on {where}"
            f" (mean {mean:.3g}, max {largest:.3g}); the engine does not hold the weights it was sent",
            wrong,
        )
    return {"health/sampler_mismatch": largest, "health/sampler_mismatch_mean": mean}
