"""Rows with a common beginning: the tree holds each shared token once, and the update stays the
same."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paw.algo.packing import Packing
from paw.algo.prefixes import clusters, common_prefix, prefix_tree
from paw.config.sections import OptimConfig
from paw.errors import UserError

ROWS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda ids: np.array(ids, np.int64)),
    min_size=1,
    max_size=12,
)


@given(ROWS)
def test_every_row_is_a_path_of_the_tree_and_no_prefix_is_there_twice(rows):
    tree = prefix_tree(rows)
    for row, path in zip(rows, tree.paths, strict=True):
        assert tree.input_ids[path].tolist() == row.tolist()
        assert tree.position_ids[path].tolist() == list(range(len(row)))

    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert len(tree.input_ids) == len(prefixes)


@given(ROWS)
def test_segments_cover_the_tree_and_end_their_paths(rows):
    tree = prefix_tree(rows)
    starts = [segment.start for segment in tree.segments]
    assert starts == [0, *(segment.end for segment in tree.segments[:-1])]
    for segment in tree.segments:
        own_positions = list(range(segment.start, segment.end))
        assert segment.path[-len(segment) :].tolist() == own_positions
        assert (np.diff(segment.path) > 0).all()


@given(ROWS, st.integers(1, 40), st.randoms(use_true_random=False))
def test_clusters_hold_every_row_once_with_the_tokens_that_their_tree_has(rows, budget, draw):
    groups = [draw.randrange(3) for _ in rows]
    row_clusters = clusters(rows, groups, budget=budget)
    assert sorted(i for cluster in row_clusters for i in cluster.rows) == list(range(len(rows)))
    for cluster in row_clusters:
        tree = prefix_tree([rows[i] for i in cluster.rows])
        assert cluster.tokens == len(tree.input_ids)
        assert cluster.attended == sum(
            len(segment) * len(segment.path) for segment in tree.segments
        )
        assert cluster.tokens <= budget or len(cluster.rows) == 1
        assert len({groups[i] for i in cluster.rows}) == 1


def test_a_row_that_shares_nothing_begins_a_cluster():
    rows = [np.array([1, 2, 3]), np.array([7, 8]), np.array([1, 2, 9])]
    assert [cluster.rows for cluster in clusters(rows, [0, 0, 0], budget=100)] == [[0, 2], [1]]


def test_common_prefix_of_rows_of_different_lengths():
    assert common_prefix(np.array([1, 2]), np.array([1, 2, 3])) == 2
    assert common_prefix(np.array([1, 2]), np.array([], np.int64)) == 0


def test_auto_shares_only_what_pays():
    rows = [np.array([1] * 100 + [i] * 100) for i in range(4)]
    lengths = [200] * 4
    shared_clusters = clusters(rows, [0] * 4, budget=10_000)
    unshared_clusters = clusters(rows, [0, 1, 2, 3], budget=10_000)
    assert Packing(budget=10_000, share_prefixes="auto").sharing_pays(shared_clusters, lengths)
    assert Packing(budget=10_000, share_prefixes="auto", pads=True).sharing_pays(
        shared_clusters, lengths
    )
    assert not Packing(budget=10_000, share_prefixes="auto").sharing_pays(
        unshared_clusters, lengths
    )
    assert not Packing(budget=10_000, share_prefixes="always").sharing_pays(
        unshared_clusters, lengths
    )

    short_rows = [row[80:140] for row in rows]  # 20 shared tokens and 40 of each row's own
    barely_shared = clusters(short_rows, [0] * 4, budget=10_000)
    assert Packing(budget=10_000, share_prefixes="auto").sharing_pays(barely_shared, [60] * 4)
    assert not Packing(budget=10_000, share_prefixes="auto", pads=True).sharing_pays(
        barely_shared, [60] * 4
    )
    assert Packing(budget=10_000, share_prefixes="always", pads=True).sharing_pays(
        barely_shared, [60] * 4
    )


def test_a_model_that_cannot_share_refuses_always_and_ignores_auto():
    model = SimpleNamespace(pads_sequences=True, shares_prefixes=False, quadratic=0.0)
    sharing_if_it_pays = OptimConfig(share_prefixes="auto")
    assert Packing.of(sharing_if_it_pays, model).share_prefixes == "never"
    always_sharing = OptimConfig(share_prefixes="always")
    with pytest.raises(UserError, match=r"^optim.share_prefixes = 'always': .* auto$"):
        Packing.of(always_sharing, model)
