"""Properties of the top-alpha selection and of the world-model weights of rows."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paw.algo.rows import gather_digests
from paw.algo.world_model import select
from paw.distributed.ranks import Ranks
from paw.types import Sample


def make_row(group, trajectory, entropy, *, episode_return=0.0, penalty=0.0, target=True):
    returns = {
        "score": episode_return - penalty,
        "episode_return": episode_return,
        "penalty": penalty,
    }
    return Sample(
        group, trajectory, 0, [1], [2], observation_ids=[3, 4] * target, entropy=entropy, **returns
    )


@st.composite
def updates(draw):
    """Rows of up to 5 groups of up to 4 trajectories. There are few distinct entropies, so ties
    occur."""
    rows = []
    trajectory = 0
    for group in range(draw(st.integers(0, 5))):
        for _ in range(draw(st.integers(1, 4))):
            episode_return = draw(st.sampled_from([0.0, 5.0, 10.0, 12.0, -3.0]))
            for _ in range(draw(st.integers(1, 4))):
                entropy = draw(st.sampled_from([0.0, 0.1, 0.5, 2.0]))
                target = draw(st.booleans())
                rows.append(
                    make_row(
                        group, trajectory, entropy, episode_return=episode_return, target=target
                    )
                )
            trajectory += 1
    return rows


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=updates(),
    alpha=st.sampled_from([0.0, 0.1, 0.5, 0.75, 1.0]),
    extra_groups=st.integers(0, 2),
)
def test_the_most_uncertain_rows_with_a_target_are_selected(rows, alpha, extra_groups):
    present = list(dict.fromkeys(row.group for row in rows))
    n_groups = len(present) + extra_groups
    selection = select(rows, alpha=alpha, weight="adaptive", reward_max=10.0, n_groups=n_groups)
    candidates = [i for i, row in enumerate(rows) if len(row.observation_ids)]
    chosen = [i for i, is_selected in enumerate(selection.selected) if is_selected]
    assert len(chosen) == math.ceil(round(alpha * len(candidates), 6))
    assert set(chosen) <= set(candidates)
    left_out = set(candidates) - set(chosen)
    for i in chosen:
        assert all((rows[i].entropy, -i) > (rows[j].entropy, -j) for j in left_out)
    # Together, the selected rows of a group carry lambda_g / G (PaW Eq. (11)).
    assert len(selection.lambdas) == len(present)
    assert all(0 <= group_weight <= 1 for group_weight in selection.lambdas)
    for group, group_weight in zip(present, selection.lambdas, strict=True):
        chosen_of_group = [i for i in chosen if rows[i].group == group]
        assert len({selection.weights[i] for i in chosen_of_group}) <= 1
        if chosen_of_group:
            assert sum(selection.weights[i] for i in chosen_of_group) == pytest.approx(
                group_weight / n_groups
            )
    assert all(
        weight == 0
        for weight, is_selected in zip(selection.weights, selection.selected, strict=True)
        if not is_selected
    )


def test_lambda_counts_each_trajectory_once_ignores_penalties_and_may_be_constant():
    rows = [make_row(0, 0, 1.0, episode_return=10.0)] + [
        make_row(0, 1, 1.0, penalty=0.1) for _ in range(9)
    ]
    selection = select(rows, alpha=1.0, weight="adaptive", reward_max=10.0, n_groups=1)
    assert selection.lambdas == [0.5]
    assert selection.weights == pytest.approx([0.05] * 10)
    selection = select(rows, alpha=1.0, weight=0.3, reward_max=10.0, n_groups=2)
    assert selection.lambdas == [0.3]
    assert selection.weights == pytest.approx([0.015] * 10)


def test_ties_go_to_the_lower_index_and_rounding_adds_no_row():
    rows = [make_row(0, 0, 1.0) for _ in range(30)]
    selection = select(rows, alpha=0.1, weight=1.0, reward_max=1.0, n_groups=1)
    assert selection.selected == [True] * 3 + [False] * 27


def test_a_group_without_failures_has_no_weight_and_rows_without_a_target_take_no_place():
    rows = [make_row(0, 0, 1.0, episode_return=10.0), make_row(1, 1, 0.5)]
    selection = select(rows, alpha=1.0, weight="adaptive", reward_max=10.0, n_groups=2)
    assert selection.lambdas == [0.0, 1.0]
    assert selection.weights == [0.0, 0.5]
    assert selection.selected == [True, True]
    rows = [make_row(0, 0, 9.0, target=False), make_row(0, 0, 1.0), make_row(0, 0, 2.0)]
    selection = select(rows, alpha=0.5, weight=1.0, reward_max=1.0, n_groups=1)
    assert selection.selected == [False, False, True]
    assert selection.weights == [0.0, 0.0, 1.0]


def test_with_dedup_of_equal_rows_only_the_first_takes_part():
    rows = [make_row(0, 0, 1.0), make_row(0, 1, 0.5), make_row(1, 2, 1.0), make_row(1, 3, 0.1)]
    rows[3].observation_ids = [3, 5]
    select_all = {"alpha": 1.0, "weight": 1.0, "reward_max": 1.0, "n_groups": 2}
    assert select(rows, **select_all).selected == [True] * 4
    distinct = gather_digests(rows, Ranks())
    assert select(rows, **select_all, distinct=distinct).selected == [True, False, False, True]
    small_selection = select(rows, **select_all | {"alpha": 0.3}, distinct=distinct)
    assert small_selection.weights == [0.5, 0.0, 0.0, 0.0]


def test_misuse_is_named():
    row = make_row(0, 0, 1.0)
    options = {"alpha": 0.75, "weight": "adaptive", "reward_max": 10.0, "n_groups": 1}
    for change, message in (
        ({"alpha": 1.5}, "alpha must be in"),
        ({"reward_max": 0.0}, "reward_max must be positive"),
        ({"n_groups": 0}, "n_groups=0 is less than the 1 groups"),
    ):
        with pytest.raises(ValueError, match=message):
            select([row], **{**options, **change})
    with pytest.raises(ValueError, match=r"sample\.entropy must be finite"):
        select([make_row(0, 0, math.nan)], **options)
