"""Sends weights from the trainer to the engine, and checks that they arrived."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from paw.errors import UserError
from paw.model.weights import Weights
from paw.rollouts.engines.base import Engine
from paw.types import Sample

LIMIT = 0.5
"""Allowed difference in nats between a token's two log-probs.

In small models, rounding costs up to 1e-6 in fp32 and 0.008 in bf16 (0.14 with sharp weights).
"""
TOLERATED = 0.05
"""Share of tokens that may be beyond LIMIT.

Rounding puts few tokens beyond it, wrong weights put many.
"""

CAUSES = (
    "each token's log_softmax(logits / temperature) over the full vocabulary was compared, or its "
    "entropy, not the parameters themselves. In an engine of your own, look at three things: `sync` "
    "copies every tensor into the parameter of that name, also a head that is tied to the "
    "embedding; it drops cached keys and values of older weights; `logp` and `entropy` are those "
    "of the request's temperature, without top-p or top-k (docs/bring-your-own.md)"
)
"""What may be wrong with an engine in this process."""
SERVER_CAUSES = (
    "it does not hold the weights it was sent, or reports numbers of another temperature"
)
"""What may be wrong with a server."""


class StaleWeightsError(UserError):
    """The log-probs of tokens sampled by `servers` are not those of the trainer's weights."""

    def __init__(self, message: str, servers: Sequence[str]) -> None:
        super().__init__(message)
        self.servers = servers


def push_weights(
    model: nn.Module, engine: Engine, version: int, dtype: torch.dtype | None = None
) -> None:
    """Send every parameter of a Hugging Face causal LM to `engine`, matrices in `dtype` (default:
    that of the parameter).

    With FSDP2, this is a collective call of all ranks. Raises UserError if `engine` stopped before
    it had taken all parameters.
    """
    weights = Weights(model, engine.checkpoint_names, dtype=dtype)
    engine.sync(weights, version)
    if not weights.taken or weights.exhausted:
        return
    total = len(weights.shapes())
    if weights.taken < total:
        raise UserError(
            f"sync of {type(engine).__name__} took {weights.taken} of {total} parameters and"
            f" stopped after '{weights.last_taken}'; it must go through all (name, tensor) pairs,"
            " or none if it samples with the trainer's model"
        )


def sampled_by(samples: Sequence[Sample], version: int) -> list[list[str | None]]:
    """Return for each response token the server that sampled it ("" without servers).

    Returns None for a token sampled by other weights.
    """
    rows: list[list[str | None]] = []
    for sample in samples:
        servers: list[str | None] = []
        for token_version in sample.versions:
            servers.append(sample.server if token_version == version else None)
        rows.append(servers)
    return rows


def sampler_mismatch(
    trainer: Sequence[list[float]],
    sampled: Sequence[list[float]],
    servers: Sequence[Sequence[str | None]] | None = None,
    what: str = "log-probs",
) -> dict[str, float]:
    """Return how far the trainer's log-probs of some responses are from the sampler's, in nats.

    Returns health/sampler_mismatch (the largest distance) and health/sampler_mismatch_mean, or {}
    without tokens. `servers` names who sampled each token. Tokens with None are left out.

    Raises StaleWeightsError if more than `TOLERATED` of a server's tokens are beyond `LIMIT` or not
    finite.
    """
    distances = _distances(trainer, sampled, servers)
    if not distances:
        return {}

    shares_off: dict[str, float] = {}
    for server, values in distances.items():
        beyond_limit = sum(not distance <= LIMIT for distance in values)  # NaN counts as well
        shares_off[server] = beyond_limit / len(values)
    stale = [server for server, share in sorted(shares_off.items()) if share > TOLERATED]

    reported: list[float] = []
    for server in stale or distances:
        reported += distances[server]
    largest = max(reported)
    mean = sum(reported) / len(reported)
    if stale:
        shares: list[str] = []
        for server in stale:
            share = f"{shares_off[server]:.0%} of {len(distances[server])} tokens"
            shares.append(f"{share} of {server}" if server else share)
        raise StaleWeightsError(
            f"stale weights: the sampler's {what} differ from the trainer's "
            f"by more than {LIMIT} nats on {', '.join(shares)} "
            f"(mean {mean:.3g}, max {largest:.3g}); {SERVER_CAUSES if stale[0] else CAUSES}",
            stale,
        )
    return {"health/sampler_mismatch": largest, "health/sampler_mismatch_mean": mean}


def _distances(
    trainer: Sequence[list[float]],
    sampled: Sequence[list[float]],
    servers: Sequence[Sequence[str | None]] | None,
) -> dict[str, list[float]]:
    """Return |trainer - sampled| for each token, by the server that sampled it.

    The server is "" for all tokens if `servers` is None.
    """
    if servers is None:
        servers = [[""] * len(row) for row in trainer]
    distances: dict[str, list[float]] = defaultdict(list)
    for trainer_logp, sampled_logp, server in zip(
        chain(*trainer), chain(*sampled), chain(*servers), strict=True
    ):
        if server is not None:
            distances[server].append(abs(trainer_logp - sampled_logp))
    return distances
