"""Mini-batches and micro-batches hold every row once and keep to their budgets."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from joint import make_row

from paw.signal.packing import by_token_budget, minibatches


@given(n=st.integers(0, 300), size=st.integers(1, 100), seed=st.integers(0, 2**40))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_minibatches_hold_every_row_once_in_nearly_equal_parts(n, size, seed):
    rows = [make_row(random.Random(0), step=i) for i in range(n)]
    parts = minibatches(rows, size=size, seed=seed)
    assert sorted(row.step for part in parts for row in part) == list(range(n))
    assert len(parts) == (max(1, round(n / size)) if n else 0)
    if parts:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_minibatches_are_shuffled_by_the_seed_alone():
    rows = [make_row(random.Random(0), step=i) for i in range(40)]

    def order(seed):
        return [row.step for part in minibatches(rows, size=10, seed=seed) for row in part]

    assert order(3) == order(3) != order(4)
    assert order(3) != list(range(40))


@given(lengths=st.lists(st.integers(0, 60), max_size=60), budget=st.integers(1, 200))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget):
    batches = by_token_budget(lengths, budget=budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


def test_a_row_beyond_the_budget_stands_alone():
    assert by_token_budget([100, 3, 100], budget=10) == [[0], [2], [1]]
    assert by_token_budget([], budget=10) == []


def test_neighbours_in_length_share_a_batch():
    lengths = [random.Random(i).randint(1, 50) for i in range(100)]
    batches = by_token_budget(lengths, budget=200)
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    assert padded < 1.15 * sum(lengths)
