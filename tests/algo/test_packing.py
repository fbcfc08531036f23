"""Mini-batches and micro-batches contain every row once and stay within their budgets."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joint import make_row
from together import make_ranks, on_all

from paw.algo.packing import Packing, balanced_batches, batches_of_similar_length
from paw.algo.sequences import minibatches
from paw.config.sections import OptimConfig
from paw.distributed.ranks import Ranks


@given(row_count=st.integers(0, 300), size=st.integers(1, 100), seed=st.integers(0, 2**40))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_minibatches_hold_every_row_once_in_nearly_equal_parts(row_count, size, seed):
    rows = [make_row(random.Random(0), step=step) for step in range(row_count)]
    row_batches = minibatches(rows, size=size, seed=seed)
    assert sorted(row.step for row_batch in row_batches for row in row_batch) == list(
        range(row_count)
    )
    assert len(row_batches) == (max(1, round(row_count / size)) if row_count else 0)
    if row_batches:
        assert max(map(len, row_batches)) - min(map(len, row_batches)) <= 1


def test_minibatches_are_shuffled_by_the_seed_alone():
    rows = [make_row(random.Random(0), step=step) for step in range(40)]

    def order(seed):
        return [row.step for part in minibatches(rows, size=10, seed=seed) for row in part]

    assert order(3) == order(3) != order(4)
    assert order(3) != list(range(40))


@given(
    lengths=st.lists(st.integers(1, 60), max_size=60),
    budget=st.integers(1, 200),
    least=st.integers(0, 9),
    quadratic=st.sampled_from([0.0, 0.01, 1.0]),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget, least, quadratic):
    batches = balanced_batches(lengths, budget=budget, least=least, quadratic=quadratic)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert len(batches) >= least
    for batch in batches:
        assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= budget
    padded = batches_of_similar_length(lengths, budget=budget, least=least)
    assert sorted(i for batch in padded for i in batch) == list(range(len(lengths)))
    assert len(padded) >= least
    for batch in padded:
        assert len(batch) <= 1 or len(batch) * max(lengths[i] for i in batch) <= budget


def test_a_row_beyond_the_budget_stands_alone():
    assert balanced_batches([100, 3, 100], budget=10) == [[0], [2], [1]]
    assert balanced_batches([], budget=10) == []
    assert balanced_batches([5], budget=10, least=3) == [[0], [], []]


@pytest.mark.parametrize("least", [0, 24])
def test_batches_are_full_and_their_work_is_balanced(least):
    """Rows are as long as the paper's ALFWorld rows. Ranks wait for each other, so their work must
    be about equal."""
    rng = random.Random(0)
    quadratic = 3.3e-5  # Qwen2.5-1.5B
    lengths = [int(min(2560, rng.lognormvariate(6.9, 0.5))) for _ in range(256)]
    batches = balanced_batches(lengths, budget=16384, least=least, quadratic=quadratic)
    assert len(batches) == max(least, -(-sum(lengths) // 16384))
    work_by_batch = [
        sum(lengths[i] + quadratic * lengths[i] ** 2 for i in batch) for batch in batches
    ]
    assert work_by_batch == sorted(work_by_batch, reverse=True)
    assert work_by_batch[0] < 1.05 * work_by_batch[-1]


def test_attention_counts_in_the_balance():
    """One row of 90 tokens costs as much attention as nine rows of 30."""
    lengths = [90, *[30] * 9]
    attending = balanced_batches(lengths, budget=300, least=2, quadratic=1.0)
    assert sorted(sum(lengths[i] for i in batch) for batch in attending) == [90, 270]
    linear = balanced_batches(lengths, budget=300, least=2)
    assert [sum(lengths[i] for i in batch) for batch in linear] == [180, 180]


def test_neighbours_in_length_are_padded_together():
    lengths = [random.Random(i).randint(1, 50) for i in range(100)]
    batches = batches_of_similar_length(lengths, budget=200)
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    assert padded < 1.15 * sum(lengths)


@pytest.mark.parametrize("pads", [False, True])
def test_a_packing_takes_the_configuration_s_budget_and_the_model_s_attention(pads):
    """Every rank has as many batches as the rank that needs the most. The model's attention decides
    how they are packed."""
    settings = OptimConfig(micro_batch_tokens=100)
    model = SimpleNamespace(pads_sequences=pads, shares_prefixes=False, quadratic=0.5)
    lengths_of = [[3, 90, 40, 41, 10, 60, 59, 7], [50, 20], []]

    def cut(ranks):
        return Packing.of(settings, model, ranks=ranks).cut(lengths_of[ranks.rank])

    divide = batches_of_similar_length if pads else partial(balanced_batches, quadratic=0.5)
    expected = divide(lengths_of[0], budget=100)
    assert Packing.of(settings, model, ranks=Ranks()).cut(lengths_of[0]) == expected
    batch_count = len(expected)
    assert on_all(make_ranks(3), cut) == [
        divide(lengths, budget=100, least=batch_count) for lengths in lengths_of
    ]
