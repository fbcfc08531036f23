"""Dividing sequences into micro-batches, by their lengths and the prefixes that they share.

The gradient does not depend on the division (tested).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from paw.algo.placement import Chains
from paw.algo.prefixes import Cluster
from paw.errors import UserError

T = TypeVar("T")
SharePrefixes = Literal["auto", "always", "never"]
LEAST_SAVED = 0.05
"""Share of the tokens that "auto" must save."""
LEAST_ADDED = 64
"""Tokens that a sequence must add on average, if attention takes sequences one by one. Many calls
for few tokens each are slower than one padded call."""


class BatchSettings(Protocol):
    """The settings that a packing needs; `paw.config.sections.OptimConfig` has them."""

    @property
    def micro_batch_tokens(self) -> int: ...

    @property
    def share_prefixes(self) -> SharePrefixes: ...


class PackedModel(Protocol):
    """The members of a model that a packing needs; `paw.model.policy.Policy` documents them."""

    pads_sequences: bool
    shares_prefixes: bool
    quadratic: float


class RankGroup(Protocol):
    """What the stages of the algorithm need of a run's ranks; `paw.distributed.ranks.Ranks` has it.

    Every method is a call of all ranks.
    """

    rank: int
    world_size: int

    def gather(self, item: Any, kind: Any = None) -> list[Any]: ...

    def gather_array(self, array: np.ndarray) -> list[np.ndarray]: ...

    def exchange_arrays(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]: ...

    def run_on_all(self, make: Callable[[], T]) -> T: ...


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The way sequences are divided into micro-batches, and the ranks that share them.

    A run makes it once (`of`), in `paw.build`. The models of a run have the same layers and so
    share the packing. To add a way of packing, write a function beside those below and choose it in
    `cut`, and in `cut_clusters` if it also suits sequences that share prefixes. A setting for it is
    a key in `paw.config.sections.OptimConfig`, a member of `BatchSettings`, and a field here, which
    `of` fills.
    """

    budget: int
    """Maximum tokens in a batch. A longer sequence gets a batch of its own."""
    pads: bool = False
    """Whether attention pads the sequences of a batch to the longest."""
    quadratic: float = 0.0
    """Cost of attention for a sequence of n tokens, divided by n^2. The unit is the cost of all
    other work per token."""
    share_prefixes: SharePrefixes = "never"
    """Whether tokens that sequences of a group share are computed once. "auto" does it if that
    saves at least LEAST_SAVED of the tokens."""
    ranks: RankGroup | None = None
    """The ranks that share the sequences. None if this process has all to itself."""

    @classmethod
    def of(
        cls, settings: BatchSettings, model: PackedModel, *, ranks: RankGroup | None = None
    ) -> "Packing":
        """Return the packing that a configuration's `optim` section gives for a model.

        Without `ranks`, all sequences belong to this process. Raises UserError if the settings
        always share prefixes but the model cannot.
        """
        if settings.share_prefixes == "always" and not model.shares_prefixes:
            raise UserError(
                "optim.share_prefixes = 'always': this model's layers need each sequence by "
                "itself; use --optim.share_prefixes auto"
            )
        return cls(
            budget=settings.micro_batch_tokens,
            pads=model.pads_sequences,
            quadratic=model.quadratic,
            share_prefixes=settings.share_prefixes if model.shares_prefixes else "never",
            ranks=ranks if ranks is not None and ranks.world_size > 1 else None,
        )

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the batches of this rank's sequences, by their lengths, as lists of indices.

        All ranks get the same number of batches, because forward passes are collective. If there
        are few sequences, some batches are empty.
        """
        if self.pads:
            return self._agreed(partial(batches_of_similar_length, lengths, budget=self.budget))
        return self._agreed(
            partial(balanced_batches, lengths, budget=self.budget, quadratic=self.quadratic)
        )

    def sharing_pays(self, clusters: Sequence[Cluster], lengths: Sequence[int]) -> bool:
        """Return whether sequences of these lengths should share prefixes in these clusters."""
        tokens = sum(cluster.tokens for cluster in clusters)
        saved = 1.0 - tokens / max(1, sum(lengths))
        if self.share_prefixes == "auto" and self.pads and tokens < LEAST_ADDED * len(lengths):
            return False
        return saved >= LEAST_SAVED if self.share_prefixes == "auto" else saved > 0.0

    def may_share(self, chains: Chains) -> bool:
        """Return whether neighbours among chains should be on one rank, to share their prefixes."""
        if self.share_prefixes == "never":
            return False
        tokens = int(chains.tokens.sum())
        shared = int(chains.shared.sum())
        return shared > 0 and (self.share_prefixes == "always" or shared >= LEAST_SAVED * tokens)

    def cut_clusters(self, clusters: Sequence[Cluster]) -> list[list[int]]:
        """Do the same as `cut` for clusters, and return the indices of their sequences."""
        batches = self._agreed(
            partial(
                balanced_batches,
                [cluster.tokens for cluster in clusters],
                budget=self.budget,
                quadratic=self.quadratic,
                attended=[cluster.attended for cluster in clusters],
            )
        )
        rows_of_batches: list[list[int]] = []
        for batch in batches:
            rows_of_batches.append(
                [row_index for cluster_index in batch for row_index in clusters[cluster_index].rows]
            )
        return rows_of_batches

    def _agreed(self, divide: Callable[..., list[list[int]]]) -> list[list[int]]:
        """Return the batches of `divide(least=...)`, as many as on the rank that needs most."""
        batches = divide()
        if self.ranks is None:
            return batches
        batch_count = max(self.ranks.gather(len(batches)))
        if len(batches) < batch_count:
            more_batches = divide(least=batch_count)
            if len(more_batches) == batch_count:
                return more_batches
        return batches + [[] for _ in range(batch_count - len(batches))]


def balanced_batches(
    lengths: Sequence[int],
    *,
    budget: int,
    least: int = 0,
    quadratic: float = 0.0,
    attended: Sequence[int] | None = None,
) -> list[list[int]]:
    """Divide indices into batches of at most `budget` tokens and nearly equal work.

    There are at least `least` batches. A sample of n tokens costs n for the work
    that is linear in tokens, plus quadratic * n^2 for attention, or quadratic * `attended` if that
    is given. The method is longest-processing-time first (Graham 1969): samples are placed in
    order of decreasing cost, and each goes to the batch with the least work. Batches are sorted,
    most expensive first, so that ranks work on batches of similar cost at the same time. If there
    are few samples, some batches are empty. A sample longer than the budget gets a batch of its
    own.

    >>> balanced_batches([3, 9, 4, 10], budget=14)
    [[0, 3], [1, 2]]
    """
    pairs = [n**2 for n in lengths] if attended is None else attended
    works = [n + quadratic * m for n, m in zip(lengths, pairs, strict=True)]
    batch_count = max(least, -(-sum(min(n, budget) for n in lengths) // budget))
    while True:
        batches = _fill(lengths, works, budget, batch_count)
        if batches is not None:
            return batches
        batch_count += 1


def _fill(
    lengths: Sequence[int], works: Sequence[float], budget: int, count: int
) -> list[list[int]] | None:
    """Fill `count` batches, or return None if the lightest batch lacks room for a sample."""
    lightest_first = [(0.0, batch, 0) for batch in range(count)]  # (work, batch, tokens)
    batches: list[list[int]] = [[] for _ in range(count)]
    batch_work = [0.0] * count
    for i in sorted(range(len(lengths)), key=lambda i: (-works[i], i)):
        work, batch, tokens = heapq.heappop(lightest_first)
        if batches[batch] and tokens + lengths[i] > budget:
            return None
        batches[batch].append(i)
        batch_work[batch] = work + works[i]
        heapq.heappush(lightest_first, (batch_work[batch], batch, tokens + lengths[i]))
    most_expensive_first = sorted(range(count), key=lambda batch: (-batch_work[batch], batch))
    return [sorted(batches[batch]) for batch in most_expensive_first]


def batches_of_similar_length(
    lengths: Sequence[int], *, budget: int, least: int = 0
) -> list[list[int]]:
    """Divide indices into batches of similar length, longest first.

    This suits attention that pads a batch to its longest sample. A batch has at most `budget`
    padded tokens, but a longer sample gets a batch of its own. Empty batches are added until there
    are `least`.

    >>> batches_of_similar_length([3, 9, 4, 10], budget=20)
    [[3, 1], [2, 0]]
    """
    batches: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    return batches + [[] for _ in range(least - len(batches))]
