"""Rows -> mini-batches -> micro-batches. Pure; the gradient does not depend on how the rows are cut (tested)."""

import random
from collections.abc import Sequence
from itertools import pairwise

from paw.types import Row


def minibatches(rows: Sequence[Row], *, size: int, seed: int) -> list[list[Row]]:
    """Cut a seeded shuffle of the update's rows into round(n / size) mini-batches of nearly equal size."""
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    count = max(1, round(len(rows) / size))
    cuts = [len(rows) * i // count for i in range(count + 1)]
    return [[rows[i] for i in order[start:end]] for start, end in pairwise(cuts) if end > start]


def by_token_budget(lengths: Sequence[int], *, budget: int) -> list[list[int]]:
    """Indices cut into batches of at most `budget` padded tokens, neighbours in length together, longest first.

    A row longer than the budget gets a batch of its own.

    >>> by_token_budget([3, 9, 4, 10], budget=20)
    [[3, 1], [2, 0]]
    """
    batches: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = max(1, lengths[i])
        batches[-1].append(i)
    return batches
