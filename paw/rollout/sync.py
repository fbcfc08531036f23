"""Weights from the trainer to the engine, and the check that they arrived."""

from collections.abc import Sequence
from itertools import chain

from torch import nn

from paw.errors import UserError
from paw.model.policy import full_parameters
from paw.rollout.engines.base import Engine

LIMIT, TOLERATED = 0.5, 0.05
"""Nats that a token's two log-probs may differ by, and the share of tokens that may be beyond it. Rounding costs up to
1e-6 in fp32, 0.008 in bf16 (0.14 with sharp weights; small models): the odd token. Wrong weights put many there."""


class StaleWeightsError(UserError):
    """The sampler's log-probabilities are not those of the trainer's weights."""


def push_weights(model: nn.Module, engine: Engine, version: int) -> None:
    """Hand every parameter of a Hugging Face causal LM to `engine`; on FSDP2 a collective call of all ranks."""
    named = full_parameters(model)
    if engine.checkpoint_names:
        from paw.rollout.engines.vllm import checkpoint_parameters

        named = checkpoint_parameters(model, named)
    engine.sync(named, version)


def sampler_mismatch(trainer: Sequence[list[float]], sampled: Sequence[list[float]]) -> dict[str, float]:
    """health/sampler_mismatch (largest) and health/sampler_mismatch_mean, nats: how far the trainer's log-probs of some
    responses are from the sampler's. StaleWeightsError when more than `TOLERATED` are beyond `LIMIT`, or not finite."""
    distances = [abs(a - b) for a, b in zip(chain(*trainer), chain(*sampled), strict=True)]
    off = sum(not d <= LIMIT for d in distances) / len(distances)  # a NaN is off as well
    largest, mean = max(distances), sum(distances) / len(distances)
    if off > TOLERATED:
        raise StaleWeightsError(
            f"stale weights: the sampler's log-probs differ from the trainer's by more than {LIMIT} nats on {off:.0%}"
            f" of {len(distances)} tokens (mean {mean:.3g}, max {largest:.3g}); the engine does not hold the"
            " weights it was sent"
        )
    return {"health/sampler_mismatch": largest, "health/sampler_mismatch_mean": mean}
