"""How sequences are cut into micro-batches, by their lengths alone.

The gradient does not depend on how they are cut (tested).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class BatchSettings(Protocol):
    """What a packing needs of the configuration: `paw.config.sections.OptimConfig` has it."""

    @property
    def micro_batch_tokens(self) -> int: ...


class PackedModel(Protocol):
    """What a packing needs of a model; `paw.model.policy.Policy` documents each member."""

    pads_sequences: bool
    quadratic: float


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How sequences are cut into micro-batches, and which of these are this rank's.

    A run makes it once (`of`), in `paw.build`; the models of a run have the same layers, and so the
    same packing. To add a way to cut, write a function beside those below and choose it in `cut`. A
    setting of it is a key in `paw.config.sections.OptimConfig`, a member of `BatchSettings`, and a
    field here, which `of` fills.
    """

    budget: int
    """Most tokens of a batch. A longer sequence has a batch of its own."""
    pads: bool = False
    """Whether attention pads the sequences of a batch to the longest."""
    quadratic: float = 0.0
    """What attention costs for a sequence of n tokens over n^2, in units of what the rest costs a
    token."""
    rank: int = 0
    world_size: int = 1

    @classmethod
    def of(
        cls, settings: BatchSettings, model: PackedModel, *, rank: int = 0, world_size: int = 1
    ) -> "Packing":
        """The packing of a configuration's `optim` section for a model.

        Without `rank` and `world_size` all batches are this rank's.
        """
        return cls(
            budget=settings.micro_batch_tokens,
            pads=model.pads_sequences,
            quadratic=model.quadratic,
            rank=rank,
            world_size=world_size,
        )

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """This rank's batches, as indices of the sequences of these lengths.

        That is every `world_size`-th batch, from the `rank`-th on. Each rank gets as many as the
        others, because forward passes are collective; if sequences are few, some batches are empty.
        """
        if self.pads:
            batches = batches_of_similar_length(
                lengths, budget=self.budget, multiple=self.world_size
            )
        else:
            batches = balanced_batches(
                lengths,
                budget=self.budget,
                multiple=self.world_size,
                quadratic=self.quadratic,
            )
        return batches[self.rank :: self.world_size]


def balanced_batches(
    lengths: Sequence[int], *, budget: int, multiple: int = 1, quadratic: float = 0.0
) -> list[list[int]]:
    """Indices in batches of at most `budget` tokens and nearly equal work.

    The number of batches is a multiple of `multiple`. A sample of n tokens costs n + quadratic *
    n^2: everything linear in tokens, and attention. Longest-processing-time first (Graham 1969):
    each sample, most expensive first, goes to the batch with the least work. Batches are sorted,
    most expensive first, so that ranks which take every `multiple`-th one work side by side on
    equals; if samples are few, some are empty. A sample longer than the budget has a batch of its
    own.

    >>> balanced_batches([3, 9, 4, 10], budget=14)
    [[0, 3], [1, 2]]
    """
    count = -(-sum(min(n, budget) for n in lengths) // budget)
    while True:
        count += -count % multiple
        batches = _fill(lengths, budget, count, quadratic)
        if batches is not None:
            return batches
        count += 1


def _fill(
    lengths: Sequence[int], budget: int, count: int, quadratic: float
) -> list[list[int]] | None:
    """`count` batches, or None if the batch with the least work lacks room for a sample."""
    lightest_first = [(0.0, batch, 0) for batch in range(count)]  # (work, batch, tokens)
    batches: list[list[int]] = [[] for _ in range(count)]
    batch_work = [0.0] * count
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        work, batch, tokens = heapq.heappop(lightest_first)
        if batches[batch] and tokens + lengths[i] > budget:
            return None
        batches[batch].append(i)
        batch_work[batch] = work + lengths[i] + quadratic * lengths[i] ** 2
        heapq.heappush(lightest_first, (batch_work[batch], batch, tokens + lengths[i]))
    most_expensive_first = sorted(range(count), key=lambda batch: (-batch_work[batch], batch))
    return [sorted(batches[batch]) for batch in most_expensive_first]


def batches_of_similar_length(
    lengths: Sequence[int], *, budget: int, multiple: int = 1
) -> list[list[int]]:
    """Indices in batches of neighbours in length, longest first.

    For attention that pads a batch to its longest sample. A batch has at most `budget` padded
    tokens, but a sample longer than that has one of its own. Empty batches make their number a
    multiple of `multiple`.

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
    return batches + [[]] * (-len(batches) % multiple)
