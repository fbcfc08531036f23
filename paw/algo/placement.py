"""Which rank computes which sequences: balanced work, few moves, shared prefixes together.

Every rank computes the same answer, from numbers that all ranks have. The unit is a chain: turns of
an episode that continue one another, whatever part of them a pass needs.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

PARTS_PER_RANK = 4
"""Parts of groups for each rank, at least. With fewer, their work could not be balanced."""


@dataclass(frozen=True)
class Chain:
    """What a pass has to compute of some turns that stay together."""

    holder: int
    """The rank that holds their tokens."""
    group: int
    order: int
    """Its place among the chains of the group: neighbours share most tokens."""
    tokens: int
    shared: int
    """How many of the tokens the chain before it in the group has too."""
    work: float
    """The cost of the pass, in that of one token without attention."""


def place(
    chains: Sequence[Chain], *, world_size: int, share_prefixes: bool, budget: int
) -> list[int]:
    """Return the rank of each chain.

    With `share_prefixes`, neighbours in a group stay together, in parts of about `budget` tokens or
    less. A part goes to the rank that holds its first chain while that has less than a fair share of
    the work, else to the rank with the least. Parts are taken from the most expensive down (Graham
    1969).
    """
    parts = [[i] for i in range(len(chains))]
    if share_prefixes:
        added = sum(chain.tokens - chain.shared for chain in chains)
        limit = min(budget, added / (PARTS_PER_RANK * world_size))
        parts = _parts_of_groups(chains, limit)

    works: list[float] = []
    holders: list[int] = []
    for part in parts:
        works.append(sum(chains[i].work for i in part))
        holders.append(chains[part[0]].holder)

    ranks = [0] * len(chains)
    for part, rank in zip(parts, _assign(works, holders, world_size), strict=True):
        for i in part:
            ranks[i] = rank
    return ranks


def _parts_of_groups(chains: Sequence[Chain], limit: float) -> list[list[int]]:
    """Cut each group, in the order of its chains, into parts of at most `limit` tokens.

    A longer chain is a part of its own. The first chain of a part shares nothing.
    """
    in_order = sorted(range(len(chains)), key=lambda i: (chains[i].group, chains[i].order))
    parts: list[list[int]] = []
    tokens = 0
    group = None
    for i in in_order:
        chain = chains[i]
        added = chain.tokens - chain.shared
        if chain.group != group or tokens + added > limit:
            parts.append([])
            tokens = 0
            added = chain.tokens
            group = chain.group
        parts[-1].append(i)
        tokens += added
    return parts


def _assign(works: Sequence[float], holders: Sequence[int], world_size: int) -> list[int]:
    """Return the rank of each part."""
    fair = sum(works) / world_size
    loads = [0.0] * world_size
    lightest = [(0.0, rank) for rank in range(world_size)]
    """Heap of (load, rank). Entries whose load has changed are stale."""

    ranks = [0] * len(works)
    for i in sorted(range(len(works)), key=lambda i: (-works[i], i)):
        rank = holders[i]
        if loads[rank] + works[i] > fair:
            while lightest[0][0] != loads[lightest[0][1]]:
                heapq.heappop(lightest)
            rank = lightest[0][1]
        ranks[i] = rank
        loads[rank] += works[i]
        heapq.heappush(lightest, (loads[rank], rank))
    return ranks
