"""Rows that begin alike, as a prefix tree: a token that several rows share is there once.

The rows of a group share their system prompt and task; those of an episode share what was said
before. A model computes the projections and the MLP of each token of the tree once. In attention the
tokens that a row adds see the row's whole path, so that every row gets the hidden states that it
would have alone, and autograd adds up the gradients of all rows in the tokens that they share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Ids = np.ndarray
"""Token ids [n] int64."""


@dataclass(frozen=True, eq=False)
class Segment:
    """The tokens [start, end) of the tree, which one row adds, and the path that they see."""

    start: int
    end: int
    path: np.ndarray
    """[n] int64: the indices, among the tree's tokens, of the row's tokens up to `end`, in order."""

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Rows of tokens, flat, with T tokens after sharing.

    Example: rows [1 2 3] and [1 2 4 5] become input_ids [1 2 3 4 5], position_ids [0 1 2 2 3],
    segments [0, 3) with the path 0 1 2 and [3, 5) with the path 0 1 3 4, and paths [0 1 2] and
    [0 1 3 4].
    """

    input_ids: Ids
    """[T] int64."""
    position_ids: np.ndarray
    """[T] int64: the index of each token in the rows that it belongs to."""
    segments: list[Segment]
    """In the order of their tokens; each begins where the one before ends."""
    paths: list[np.ndarray]
    """For each row, in the order in which rows were given, the indices of its tokens."""


def prefix_tree(rows: Sequence[Ids]) -> PrefixTree:
    """The prefix tree of rows of at least one token."""
    input_ids: list[Ids] = []
    position_ids: list[np.ndarray] = []
    segments: list[Segment] = []
    paths: list[np.ndarray] = [np.empty(0, np.int64)] * len(rows)

    tokens = 0
    previous = np.empty(0, np.int64)
    path = previous
    for i in sorted_order(rows):
        row = rows[i]
        shared = common_prefix(row, previous)
        added = len(row) - shared
        path = np.concatenate([path[:shared], np.arange(tokens, tokens + added)])
        if added:
            input_ids.append(row[shared:])
            position_ids.append(np.arange(shared, len(row)))
            segments.append(Segment(tokens, tokens + added, path))
        paths[i] = path
        tokens += added
        previous = row
    return PrefixTree(
        input_ids=np.concatenate(input_ids),
        position_ids=np.concatenate(position_ids),
        segments=segments,
        paths=paths,
    )


@dataclass(frozen=True)
class Cluster:
    """Rows whose prefix tree is computed in one forward pass."""

    rows: list[int]
    """Their indices, in the order of their tokens."""
    tokens: int
    """The number of tokens of their tree."""
    attended: int
    """How many (token, seen token) pairs attention computes, a square for each row without sharing."""


def clusters(rows: Sequence[Ids], groups: Sequence[int], *, budget: int) -> list[Cluster]:
    """Rows of the same group together, as many as share their tokens within `budget`.

    `groups` has the group of each row. A row that shares nothing with the row before begins a
    cluster of its own, so that those can be spread over batches freely.
    """
    rows_of_group: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        rows_of_group.setdefault(group, []).append(i)

    found: list[Cluster] = []
    for members in rows_of_group.values():
        order = sorted_order([rows[i] for i in members])
        found += _clusters_of_sorted(rows, [members[j] for j in order], budget)
    return found


def _clusters_of_sorted(rows: Sequence[Ids], order: Sequence[int], budget: int) -> list[Cluster]:
    found: list[Cluster] = []
    members: list[int] = []
    tokens = 0
    attended = 0
    for i in order:
        length = len(rows[i])
        shared = common_prefix(rows[i], rows[members[-1]]) if members else 0
        added = length - shared
        if members and (not shared or tokens + added > budget):
            found.append(Cluster(members, tokens, attended))
            members = []
            tokens = 0
            attended = 0
            added = length
        members.append(i)
        tokens += added
        attended += added * length
    if members:
        found.append(Cluster(members, tokens, attended))
    return found


def sorted_order(rows: Sequence[Ids]) -> list[int]:
    """Indices of the rows in the order of their tokens.

    In this order a row shares its longest prefix with the row before it, and follows its prefixes.
    """
    # Numbers from 0 to 2^31 - 1 with the highest byte first are in the order of their bytes.
    return sorted(range(len(rows)), key=lambda i: (rows[i].astype(">i4").tobytes(), i))


def common_prefix(first: Ids, second: Ids) -> int:
    """How many tokens two rows share at their start.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
