"""Which rank computes which sequences: balanced work, few moves, shared prefixes together.

Every rank computes the same answer, from numbers that all ranks have. The unit is a chain: turns of
an episode that continue one another, whatever part of them a pass needs.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

PARTS_PER_RANK = 4
"""Parts of groups for each rank, at least. With fewer, their work could not be balanced."""


@dataclass(frozen=True, kw_only=True)
class Chains:
    """The work of a pass on C chains, turns that stay together. Each field is [C]."""

    holder: np.ndarray
    """int: the rank that holds the tokens."""
    group: np.ndarray
    order: np.ndarray
    """int: the place among the chains of the group, in which neighbours share the most tokens."""
    tokens: np.ndarray
    shared: np.ndarray
    """int: how many of the tokens it shares with the chain before it in the group."""
    work: np.ndarray
    """float64: the cost in the pass. The unit is the cost of one token without attention."""

    def __len__(self) -> int:
        return len(self.holder)


def place(chains: Chains, *, world_size: int, share_prefixes: bool, budget: int) -> np.ndarray:
    """Return the rank of each chain, [C] int32.

    With `share_prefixes`, neighbours in a group stay together, in parts of about `budget` tokens or
    less. Parts are placed in order of decreasing cost (Graham 1969). Each goes to the rank that
    holds its first chain if that rank then has at most a fair share of the work, else to the rank
    with the least work.
    """
    if not share_prefixes:
        return _assign(chains.work, chains.holder, world_size)

    unshared_tokens = int((chains.tokens - chains.shared).sum())
    limit = min(budget, unshared_tokens / (PARTS_PER_RANK * world_size))
    in_order = np.lexsort((chains.order, chains.group))
    part_of_chain, first_of_part = _parts_of_groups(chains, in_order, limit)
    works = np.bincount(part_of_chain, chains.work[in_order])
    rank_of_part = _assign(works, chains.holder[in_order[first_of_part]], world_size)

    ranks = np.empty(len(chains), np.int32)
    ranks[in_order] = rank_of_part[part_of_chain]
    return ranks


def _parts_of_groups(
    chains: Chains, in_order: np.ndarray, limit: float
) -> tuple[np.ndarray, np.ndarray]:
    """Cut each group, in the order of its chains, into parts of at most `limit` tokens.

    A longer chain is a part of its own. The first chain of a part shares nothing. Returns (the part
    of each chain, the place of each part's first chain), both for chains `in_order`.
    """
    part_of_chain: list[int] = []
    firsts: list[int] = []
    tokens = 0
    group = None
    rows = zip(
        chains.group[in_order].tolist(),
        chains.tokens[in_order].tolist(),
        chains.shared[in_order].tolist(),
        strict=True,
    )
    for place_in_order, (chain_group, chain_tokens, shared) in enumerate(rows):
        added_tokens = chain_tokens - shared
        if chain_group != group or tokens + added_tokens > limit:
            firsts.append(place_in_order)
            tokens = 0
            added_tokens = chain_tokens
            group = chain_group
        part_of_chain.append(len(firsts) - 1)
        tokens += added_tokens
    return np.array(part_of_chain, np.int64), np.array(firsts, np.int64)


def _assign(works: np.ndarray, holders: np.ndarray, world_size: int) -> np.ndarray:
    """Return the rank of each part, [P] int32."""
    fair = sum(works.tolist()) / world_size
    most_first = np.argsort(-works, kind="stable")
    loads_after = _loads_of_holders(works, holders, most_first, world_size)
    # Until the first rank is full, all parts stay with their holders.
    is_full = loads_after[most_first] > fair
    stay = int(is_full.argmax()) if is_full.any() else len(works)
    loads = np.zeros(world_size)
    np.maximum.at(loads, holders[most_first[:stay]], loads_after[most_first[:stay]])

    rest = most_first[stay:]
    ranks = holders.astype(np.int32)
    ranks[rest] = _fill(works[rest].tolist(), holders[rest].tolist(), loads.tolist(), fair)
    return ranks


def _loads_of_holders(
    works: np.ndarray, holders: np.ndarray, most_first: np.ndarray, world_size: int
) -> np.ndarray:
    """Return for each part, [P], the load of its holder after it, if holders keep all parts."""
    by_holder = most_first[np.argsort(holders[most_first], kind="stable")]
    ends = np.cumsum(np.bincount(holders, minlength=world_size))
    loads = np.empty(len(works))
    for start, end in pairwise([0, *ends.tolist()]):
        loads[by_holder[start:end]] = np.cumsum(works[by_holder[start:end]])
    return loads


def _fill(
    works: Sequence[float], holders: Sequence[int], loads: list[float], fair: float
) -> list[int]:
    """Return the rank of each part, given the `loads` of the ranks before these parts."""
    lightest = [(load, rank) for rank, load in enumerate(loads)]
    """Heap of (load, rank), one entry a rank. Loads only grow, so a stale entry is too small."""
    heapq.heapify(lightest)

    ranks: list[int] = []
    for work, holder in zip(works, holders, strict=True):
        rank = holder
        if loads[rank] + work > fair:
            while lightest[0][0] != loads[lightest[0][1]]:
                stale_rank = lightest[0][1]
                heapq.heapreplace(lightest, (loads[stale_rank], stale_rank))
            rank = lightest[0][1]
        ranks.append(rank)
        loads[rank] += work
    return ranks
