"""Sends weights from the trainer to the engine, and checks that they arrived."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from paw.distributed.ranks import Ranks
from paw.errors import UserError
from paw.model.weights import Weights
from paw.rollouts.engines.base import Engine
from paw.types import Ids, Sample, Values, no_ids

ALONE = Ranks()
LIMIT = 0.5
"""Allowed difference in nats between a token's two log-probs.

In small models, rounding costs up to 1e-6 in fp32 and 0.008 in bf16 (0.14 with sharp weights).
"""
TOLERATED = 0.05
"""Share of tokens that may be beyond LIMIT.

Rounding puts few tokens beyond it, wrong weights put many.
"""

CAUSES = (
    "this compares each token's log_softmax(logits / temperature) over the full vocabulary, or its "
    "entropy, not the parameters themselves. In an engine of your own, check three things: `sync` "
    "copies every tensor into the parameter of that name, including a head that is tied to the "
    "embedding; it drops cached keys and values of older weights; `logp` and `entropy` are at the "
    "request's temperature, without top-p or top-k (docs/bring-your-own.md)"
)
"""What may be wrong with an engine in this process."""
SERVER_CAUSES = (
    "it does not hold the weights it was sent, or reports numbers for another temperature"
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
    """Send every parameter of a Hugging Face causal LM to `engine`. Matrices are sent in `dtype`
    (default: that of the parameter).

    With FSDP2, every rank must call this. Raises UserError if `engine` stopped before it had taken
    all parameters.
    """
    weights = Weights(model, engine.checkpoint_names, dtype=dtype)
    engine.sync(weights, version)
    if not weights.taken or weights.exhausted:
        return
    tensor_count = len(weights.shapes())
    if weights.taken < tensor_count:
        raise UserError(
            f"sync of {type(engine).__name__} took {weights.taken} of {tensor_count} parameters and"
            f" stopped after '{weights.last_taken}'; it must go through all (name, tensor) pairs,"
            " or none if it samples with the trainer's model"
        )


@dataclass(frozen=True)
class SampledBy:
    """Which server sampled each of N tokens with the trainer's weights.

    Example: servers ["a", "b"], index [1, 1, 0, 2] is two tokens of a, one token of other weights,
    and one of b.
    """

    servers: list[str]
    """Their URLs; [""] without servers."""
    index: Ids
    """[N]: 1 + the index of the token's server, or 0 if other weights sampled the token."""

    @classmethod
    def of_all(cls, parts: Sequence["SampledBy"]) -> "SampledBy":
        """Return the concatenation of the parts."""
        servers = list(dict.fromkeys(server for sampled in parts for server in sampled.servers))
        indices = [no_ids()]
        for sampled in parts:
            numbers = [0, *(1 + servers.index(server) for server in sampled.servers)]
            indices.append(np.array(numbers, np.int32)[sampled.index])
        return cls(servers, np.concatenate(indices))


def sampled_by(samples: Sequence[Sample], version: int) -> SampledBy:
    """Return who sampled the samples' response tokens. `version` is that of the weights."""
    servers = list(dict.fromkeys(sample.server for sample in samples))
    number = {server: 1 + i for i, server in enumerate(servers)}
    versions = np.concatenate([no_ids(), *(sample.versions for sample in samples)])
    numbers = np.repeat(
        np.array([number[sample.server] for sample in samples], np.int32),
        [len(sample.versions) for sample in samples],
    )
    return SampledBy(servers, np.where(versions == version, numbers, 0).astype(np.int32))


@dataclass
class Distances:
    """How far the trainer's log-probs are from those of one server, over the server's tokens."""

    tokens: int = 0
    beyond_limit: int = 0
    total: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, values: Values) -> "Distances":
        return cls(
            tokens=len(values),
            beyond_limit=int((~(values <= LIMIT)).sum()),  # NaN counts too
            total=sum(values.tolist()),
            largest=float(values.max()),
        )

    def add(self, other: "Distances") -> None:
        self.tokens += other.tokens
        self.beyond_limit += other.beyond_limit
        self.total += other.total
        self.largest = float(np.maximum(self.largest, other.largest))  # NaN if one is NaN


def sampler_mismatch(
    trainer: Values,
    sampled: Values,
    origins: SampledBy | None = None,
    what: str = "log-probs",
    *,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Return how far the trainer's log-probs [N] of tokens are from the sampler's, in nats.

    Returns health/sampler_mismatch (the largest distance) and health/sampler_mismatch_mean, or {}
    without tokens. Tokens that `origins` assigns to other weights are left out. Each rank passes
    its own tokens and gets the result for all.

    Raises StaleWeightsError on all ranks if more than `TOLERATED` of a server's tokens are beyond
    `LIMIT` or not finite.
    """
    own_distances = _distances(trainer, sampled, origins)
    distances: dict[str, Distances] = {}
    for distances_of_rank in ranks.gather(own_distances, dict[str, Distances]):
        for server, of_server in distances_of_rank.items():
            distances.setdefault(server, Distances()).add(of_server)
    if not distances:
        return {}

    stale: list[str] = []
    for server, of_server in sorted(distances.items()):
        if of_server.beyond_limit / of_server.tokens > TOLERATED:
            stale.append(server)
    reported = Distances()
    for server in stale or distances:
        reported.add(distances[server])
    mean = reported.total / reported.tokens
    if stale:
        shares: list[str] = []
        for server in stale:
            of_server = distances[server]
            share = f"{of_server.beyond_limit / of_server.tokens:.0%} of {of_server.tokens} tokens"
            shares.append(f"{share} of {server}" if server else share)
        raise StaleWeightsError(
            f"stale weights: the sampler's {what} differ from the trainer's "
            f"by more than {LIMIT} nats on {', '.join(shares)} "
            f"(mean {mean:.3g}, max {reported.largest:.3g}); "
            f"{SERVER_CAUSES if stale[0] else CAUSES}",
            stale,
        )
    return {"health/sampler_mismatch": reported.largest, "health/sampler_mismatch_mean": mean}


def _distances(trainer: Values, sampled: Values, origins: SampledBy | None) -> dict[str, Distances]:
    """Return the distances |trainer - sampled| of tokens, by the server that sampled them.

    The server is "" for all tokens if `origins` is None.
    """
    if origins is None:
        origins = SampledBy([""], np.ones(len(trainer), np.int32))
    if not len(trainer) == len(sampled) == len(origins.index):
        raise ValueError(f"{len(trainer)} log-probs and {len(sampled)} of the sampler")
    all_distances = np.abs(trainer.astype(np.float64) - sampled.astype(np.float64))

    distances: dict[str, Distances] = {}
    for number, server in enumerate(origins.servers, 1):
        of_server = all_distances[origins.index == number]
        if len(of_server):
            distances[server] = Distances.of(of_server)
    return distances
