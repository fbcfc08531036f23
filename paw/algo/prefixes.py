"""Prefix trees of rows that begin alike: a token that several rows share is stored once.

The rows of a group share their system prompt and task. The rows of an episode share its earlier
turns. A model computes the projections and the MLP of each token of the tree once. In attention,
the tokens that a row adds see the row's whole path, so every row gets the hidden states that it
would get alone. Autograd adds up the gradients of all rows in the tokens that they share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paw.types import Ids


@dataclass(frozen=True, eq=False)
class Segment:
    """The tokens [start, end) of the tree that one row adds, and the path that they see."""

    start: int
    end: int
    path: np.ndarray
    """[n] int64: indices, among the tree's tokens, of the row's tokens up to `end`, in order."""

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
    """[T], of the rows' dtype."""
    position_ids: np.ndarray
    """[T] int64: the index of each token in the rows that it belongs to."""
    segments: list[Segment]
    """In the order of their tokens; each begins where the one before ends."""
    paths: list[np.ndarray]
    """For each row, in the order in which rows were given, the indices of its tokens."""


def prefix_tree(rows: Sequence[Ids]) -> PrefixTree:
    """Return the prefix tree of rows that have at least one token each."""
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
        new_tokens = len(row) - shared
        path = np.concatenate([path[:shared], np.arange(tokens, tokens + new_tokens)])
        if new_tokens:
            input_ids.append(row[shared:])
            position_ids.append(np.arange(shared, len(row)))
            segments.append(Segment(tokens, tokens + new_tokens, path))
        paths[i] = path
        tokens += new_tokens
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
    """Number of (token, seen token) pairs that attention computes. Without sharing, it is the sum
    of the squared lengths."""


def clusters(rows: Sequence[Ids], groups: Sequence[int], *, budget: int) -> list[Cluster]:
    """Divide rows into clusters that share tokens and have at most `budget` tokens each.

    `groups` has the group of each row. A cluster has rows of one group only. A row that shares
    nothing with the row before it begins a new cluster, so that batches can be balanced freely. A
    row longer than the budget has a cluster of its own.
    """
    rows_of_group: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        rows_of_group.setdefault(group, []).append(i)

    all_clusters: list[Cluster] = []
    for members in rows_of_group.values():
        order = sorted_order([rows[i] for i in members])
        all_clusters += _clusters_of_sorted(rows, [members[j] for j in order], budget)
    return all_clusters


def _clusters_of_sorted(rows: Sequence[Ids], order: Sequence[int], budget: int) -> list[Cluster]:
    """Cut the rows in this order, which is that of their tokens, into clusters."""
    finished: list[Cluster] = []
    members: list[int] = []
    tokens = 0
    attended = 0
    for i in order:
        length = len(rows[i])
        shared = common_prefix(rows[i], rows[members[-1]]) if members else 0
        new_tokens = length - shared
        if members and (not shared or tokens + new_tokens > budget):
            finished.append(Cluster(members, tokens, attended))
            members = []
            tokens = 0
            attended = 0
            new_tokens = length
        members.append(i)
        tokens += new_tokens
        attended += new_tokens * length
    if members:
        finished.append(Cluster(members, tokens, attended))
    return finished


def sorted_order(rows: Sequence[Ids]) -> list[int]:
    """Return the indices of the rows, sorted by their tokens.

    In this order, a row shares its longest prefix with the row before it.
    """
    # Numbers from 0 to 2^31 - 1 with the highest byte first are in the order of their bytes.
    return sorted(range(len(rows)), key=lambda i: (rows[i].astype(">i4").tobytes(), i))


def common_prefix(first: Ids, second: Ids) -> int:
    """Return the number of tokens that two rows share at their start.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
