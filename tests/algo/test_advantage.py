"""Advantages match the worked example of the module and the outputs of the reference code."""

import json
from functools import partial
from pathlib import Path

import pytest

from paw.algo.advantages import drop_penalty_only, gigpo, grpo, rloo, step_returns
from paw.config import plugins
from paw.config.sections import estimator_traits
from paw.types import Sample

RELATIVE = [name for name in plugins.BUILT_IN["advantages"] if estimator_traits(name).needs_groups]
"""The built-in estimators that compare the episodes of a task."""
BY_GROUP = [name for name in plugins.BUILT_IN["advantages"] if estimator_traits(name).by_group]
"""The built-in estimators that treat each group separately."""
PARITY = Path(__file__).parents[2] / ".." / "shared" / "data" / "parity" / "advantages.json"


def advantages(rows, estimator="grpo", **settings):
    """Advantages of the estimator with this name, with its default settings."""
    return plugins.load("advantages", estimator)(rows, **settings)


def make_row(group, trajectory, step, *, reward=0.0, episode_return=0.0, penalty=0.0, anchor=""):
    returns = {
        "score": episode_return - penalty,
        "episode_return": episode_return,
        "reward": reward,
        "penalty": penalty,
    }
    return Sample(group, trajectory, step, [1], [2], anchor=anchor, **returns)


def worked_example():
    return [
        make_row(0, 0, 0, episode_return=10.0, anchor="s0"),
        make_row(0, 0, 1, episode_return=10.0, anchor="s1", reward=10.0),
        make_row(0, 1, 0, anchor="s0"),
        make_row(0, 1, 1, anchor="s0", penalty=0.1),
        make_row(0, 1, 2, anchor="s2"),
    ]


def test_the_worked_example():
    rows = worked_example()
    assert step_returns(rows, gamma=0.95) == pytest.approx([9.5, 10, 0, -0.1, 0])
    expected = [1.095415, 1.095415, -0.724211, -0.742407, -0.724211]
    assert grpo(rows) == pytest.approx(expected, abs=1e-5)
    expected = [0.707107, 0.707107, -0.707107, -0.721249, -0.707107]
    assert grpo(rows, stat="trajectories") == pytest.approx(expected, abs=1e-5)
    assert rloo(rows) == pytest.approx([7.525, 7.525, -4.975, -5.1, -4.975])
    expected = [2.250068, 1.095415, -1.29247, -1.328802, -0.724211]
    assert gigpo(rows) == pytest.approx(expected, abs=1e-5)
    assert gigpo(rows, norm_std=False) == pytest.approx(
        [12.386667, 6.02, -7.113333, -7.313333, -3.98], abs=1e-5
    )
    assert gigpo(rows, omega=0.0) == pytest.approx(grpo(rows))
    # Dr. GRPO: the mean over steps is 19.9 / 5 = 3.98, over trajectories (10 + 0) / 2.
    assert grpo(rows, norm_std=False) == pytest.approx([6.02, 6.02, -3.98, -4.08, -3.98])
    assert grpo(rows, norm_std=False, stat="trajectories") == pytest.approx([5, 5, -5, -5.1, -5])


def played(*trajectories):
    """Rows of one group. Each trajectory is a list of (anchor, reward)."""
    rows = []
    for trajectory, turns in enumerate(trajectories):
        episode_return = sum(reward for _, reward in turns)
        for step, (anchor, reward) in enumerate(turns):
            rows.append(
                make_row(
                    0,
                    trajectory,
                    step,
                    reward=reward,
                    episode_return=episode_return,
                    anchor=anchor,
                )
            )
    return rows


def test_a_long_win_and_a_short_failure_by_hand():
    """Three steps with return 1 and one step with return 0."""
    rows = played([("a", 0.0), ("b", 0.0), ("c", 1.0)], [("a", 0.0)])
    # Over steps 1, 1, 1, 0: mean 3/4, var (3/16 + 9/16) / 3 = 1/4. Over trajectories 1, 0: mean
    # 1/2, var 1/2.
    assert grpo(rows, eps=0.0) == pytest.approx([0.5, 0.5, 0.5, -1.5])
    assert grpo(rows, eps=0.0, stat="trajectories") == pytest.approx([0.5**0.5] * 3 + [-(0.5**0.5)])
    # eps is added to the std of 1/2.
    assert grpo(rows, eps=0.5) == pytest.approx([0.25, 0.25, 0.25, -0.75])
    assert grpo(rows, norm_std=False) == pytest.approx([0.25, 0.25, 0.25, -0.75])
    # The score minus the mean of the others: 1 - (1 + 1 + 0) / 3 and 0 - 1. With two trajectories:
    # 1 - 0 and 0 - 1.
    assert rloo(rows) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert rloo(rows, stat="trajectories") == pytest.approx([1.0, 1.0, 1.0, -1.0])


def test_gigpo_with_exact_anchors_by_hand():
    """One trajectory passes s1 twice and wins 8. The other gives up at s1. gamma is 1/2."""
    rows = played([("s0", 0.0), ("s1", 0.0), ("s1", 8.0)], [("s0", 0.0), ("s1", 0.0)])
    assert step_returns(rows, gamma=0.5) == [2.0, 4.0, 8.0, 0.0, 0.0]
    # Episode: scores 8, 8, 8, 0, 0, mean 4.8: +3.2, -4.8; var (3 3.2^2 + 2 4.8^2) / 4 = 19.2.
    # Steps: at s0 2, 0, mean 1, var 2; at s1 4, 8, 0, mean 4, var 16.
    unweighted = [3.2 + 1, 3.2 + 0, 3.2 + 4, -4.8 - 1, -4.8 - 4]
    assert gigpo(rows, gamma=0.5, norm_std=False) == pytest.approx(unweighted)
    half_weighted = [3.2 + 0.5, 3.2 + 0, 3.2 + 2, -4.8 - 0.5, -4.8 - 2]
    assert gigpo(rows, gamma=0.5, norm_std=False, omega=0.5) == pytest.approx(half_weighted)
    win_advantage = 3.2 / 19.2**0.5
    loss_advantage = -4.8 / 19.2**0.5
    step_advantage = 0.5**0.5
    assert gigpo(rows, gamma=0.5, eps=0.0) == pytest.approx(
        [
            win_advantage + step_advantage,
            win_advantage + 0,
            win_advantage + 1,
            loss_advantage - step_advantage,
            loss_advantage - 1,
        ]
    )


def test_gigpo_with_similar_anchors_by_hand():
    """One-step episodes. The middle anchor is similar to the first (9 of 10 letters: 0.9) and to
    the last, but the first and the last are not similar (0.8).

    Rows are compared with the first anchor of a cluster. The last turn joins the cluster if the
    middle one opened it, and stays alone if the first turn did.
    """
    first_turn = ("abcdefghij", 0.0)
    middle_turn = ("abcdefghiX", 6.0)
    last_turn = ("abcdefghYX", 9.0)
    gigpo_of_similar = partial(gigpo, norm_std=False, similarity=0.9)
    # Scores 0, 6, 9, mean 5. Clusters {0, 6} and {9}, then {6, 0, 9}.
    assert gigpo_of_similar(played([first_turn], [middle_turn], [last_turn])) == pytest.approx(
        [-5 - 3, 1 + 3, 4 + 0]
    )
    assert gigpo_of_similar(played([middle_turn], [first_turn], [last_turn])) == pytest.approx(
        [1 + 1, -5 - 5, 4 + 4]
    )
    # All three anchors are different.
    assert gigpo(played([first_turn], [middle_turn], [last_turn]), norm_std=False) == pytest.approx(
        [-5, 1, 4]
    )


COLUMNS = {
    "grpo_steps": dict(estimator="grpo"),
    "grpo_trajectories": dict(estimator="grpo", stat="trajectories"),
    "dr_grpo_steps": dict(estimator="grpo", norm_std=False),
    "rloo_steps": dict(estimator="rloo"),
    "gigpo_mean_norm": dict(estimator="gigpo", norm_std=False),
    "gigpo_mean_std_norm": dict(estimator="gigpo", norm_std=True),
    "gigpo_mean_std_norm_similarity_0.9": dict(estimator="gigpo", norm_std=True, similarity=0.9),
}


def rows_of(case):
    """The rows of a case. It names groups and trajectories, and we number them."""
    groups: dict[str, int] = {}
    trajectories: dict[str, int] = {}
    rows = []
    for printed in case["rows"]:
        row = make_row(
            groups.setdefault(printed["group"], len(groups)),
            trajectories.setdefault(printed["trajectory"], len(trajectories)),
            printed["step"],
            reward=printed["reward"],
            episode_return=printed["episode_return"],
            penalty=case["penalty"] * printed["invalid"],
            anchor=printed["anchor"],
        )
        rows.append(row)
    return rows


@pytest.mark.skipif(
    not PARITY.exists(), reason="parity data of the reference code is not on this machine"
)
@pytest.mark.parametrize("column", COLUMNS)
def test_all_cases_match_the_reference_code(column):
    cases = json.loads(PARITY.read_text())
    assert len(cases) == 31
    for case in cases:
        rows = rows_of(case)
        expected_returns = [line["step_return"] for line in case["rows"]]
        assert step_returns(rows, gamma=case["gamma"]) == pytest.approx(expected_returns)
        settings = dict(COLUMNS[column])
        if "gigpo" in column:
            settings["gamma"] = case["gamma"]
        result = advantages(rows, **settings)
        assert result == pytest.approx(case["expected"][column], rel=1e-4, abs=1e-4)


def test_groups_do_not_mix():
    first_group = worked_example()
    second_group = [
        make_row(1, 2 + t, 0, episode_return=r, reward=r, anchor="s0")
        for t, r in enumerate([0.0, 5.0])
    ]
    for name in BY_GROUP:
        assert advantages(first_group + second_group, name) == advantages(
            first_group, name
        ) + advantages(second_group, name)


def test_a_group_that_differs_by_penalties_alone_can_be_dropped():
    """In such a group, a penalty of 0.1 is scaled up to a full advantage."""
    failed_group = [make_row(0, t, 0, penalty=0.1 * (t == 2), anchor="s") for t in range(3)]
    mixed_group = [
        make_row(1, 3 + t, 0, episode_return=r, anchor="s") for t, r in enumerate([0.0, 10.0])
    ]
    undropped = advantages(failed_group + mixed_group)
    assert undropped[2] == pytest.approx(-1.1547, abs=1e-3)
    assert drop_penalty_only(failed_group + mixed_group, undropped) == [
        0.0,
        0.0,
        0.0,
        *undropped[3:],
    ]


def test_edges():
    equal_rows = [make_row(0, t, 0, episode_return=9.9, anchor="s") for t in range(7)]
    for name in RELATIVE:
        assert advantages([], name) == []
        assert advantages(equal_rows, name) == [0.0] * 7
    assert grpo([make_row(0, 0, 0, episode_return=3.0)]) == pytest.approx([3.0], abs=1e-5)
    assert rloo([make_row(0, 0, 0, episode_return=3.0)]) == [3.0]
