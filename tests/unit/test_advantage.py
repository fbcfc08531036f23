"""Advantages against the worked example of the module and the outputs of the reference code."""

import json
from functools import partial
from pathlib import Path

import pytest

from paw.signal.advantage import advantages, grpo, rloo, step_returns
from paw.types import Row

gigpo = partial(advantages, estimator="gigpo")
PARITY = Path(__file__).parents[2] / ".." / "shared" / "data" / "parity" / "advantages.json"


def make_row(group, trajectory, step, *, reward=0.0, episode_return=0.0, penalty=0.0, anchor=""):
    return Row(
        group=group,
        trajectory=trajectory,
        step=step,
        prompt_ids=[1],
        response_ids=[2],
        separator_ids=[],
        observation_ids=[],
        sampled_logp=[-0.5],
        sampled_entropy=None,
        score=episode_return - penalty,
        episode_return=episode_return,
        reward=reward,
        penalty=penalty,
        anchor=anchor,
    )


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
    assert gigpo(rows, gigpo_norm="mean") == pytest.approx([12.386667, 6.02, -7.113333, -7.313333, -3.98], abs=1e-5)
    assert gigpo(rows, omega=0.0) == pytest.approx(grpo(rows))


COLUMNS = {
    "grpo_steps": dict(estimator="grpo"),
    "grpo_trajectories": dict(estimator="grpo", stat="trajectories"),
    "dr_grpo_steps": dict(estimator="grpo", norm_std=False),
    "rloo_steps": dict(estimator="rloo"),
    "gigpo_mean_norm": dict(estimator="gigpo", gigpo_norm="mean"),
    "gigpo_mean_std_norm": dict(estimator="gigpo", gigpo_norm="mean_std"),
    "gigpo_mean_std_norm_similarity_0.9": dict(estimator="gigpo", gigpo_norm="mean_std", similarity=0.9),
}


@pytest.mark.skipif(not PARITY.exists(), reason="parity data of the reference code is not on this machine")
@pytest.mark.parametrize("column", COLUMNS)
def test_all_cases_match_the_reference_code(column):
    cases = json.loads(PARITY.read_text())
    assert len(cases) == 31
    for case in cases:
        groups = {name: i for i, name in enumerate(dict.fromkeys(r["group"] for r in case["rows"]))}
        trajectories = {name: i for i, name in enumerate(dict.fromkeys(r["trajectory"] for r in case["rows"]))}
        rows = [
            make_row(
                groups[r["group"]],
                trajectories[r["trajectory"]],
                r["step"],
                reward=r["reward"],
                episode_return=r["episode_return"],
                penalty=case["penalty"] * r["invalid"],
                anchor=r["anchor"],
            )
            for r in case["rows"]
        ]
        assert step_returns(rows, gamma=case["gamma"]) == pytest.approx([r["step_return"] for r in case["rows"]])
        got = advantages(rows, gamma=case["gamma"], **COLUMNS[column])
        assert got == pytest.approx(case["expected"][column], rel=1e-4, abs=1e-4)


def test_groups_do_not_mix():
    first = worked_example()
    second = [make_row(1, 2 + t, 0, episode_return=r, reward=r, anchor="s0") for t, r in enumerate([0.0, 5.0])]
    for estimator in ("grpo", "rloo", "gigpo"):
        together = advantages(first + second, estimator=estimator)
        assert together == advantages(first, estimator=estimator) + advantages(second, estimator=estimator)


def test_a_group_that_differs_by_penalties_alone_can_be_dropped():
    failed = [make_row(0, t, 0, penalty=0.1 * (t == 2), anchor="s") for t in range(3)]
    mixed = [make_row(1, 3 + t, 0, episode_return=r, anchor="s") for t, r in enumerate([0.0, 10.0])]
    for estimator in ("grpo", "rloo", "gigpo"):
        kept = advantages(failed + mixed, estimator=estimator)
        assert kept[2] < -0.09
        dropped = advantages(failed + mixed, estimator=estimator, penalty_only="drop")
        assert dropped[:3] == [0.0, 0.0, 0.0] and dropped[3:] == kept[3:]
    # The blow-up the guard is for: a penalty of 0.1 reaches full scale.
    assert advantages(failed)[2] == pytest.approx(-1.1547, abs=1e-3)


def test_equal_scores_give_exactly_zero():
    rows = [make_row(0, t, 0, episode_return=9.9, anchor="s") for t in range(7)]
    for estimator in ("grpo", "rloo", "gigpo"):
        assert advantages(rows, estimator=estimator) == [0.0] * 7


def test_similar_anchors_share_a_cluster():
    texts = ["You are in the kitchen, facing the fridge 1.", "You are in the kitchen, facing the fridge 2.", "Nothing."]
    rows = [
        make_row(0, t, 0, episode_return=r, reward=r, anchor=a)
        for t, (r, a) in enumerate(zip([0.0, 10.0, 5.0], texts, strict=True))
    ]
    assert gigpo(rows) == pytest.approx(grpo(rows))
    clustered = [g - e for g, e in zip(gigpo(rows, similarity=0.9), grpo(rows), strict=True)]
    assert clustered == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0], abs=1e-5)


def test_edges():
    assert advantages([]) == []
    assert grpo([make_row(0, 0, 0, episode_return=3.0)]) == pytest.approx([3.0], abs=1e-5)
    assert rloo([make_row(0, 0, 0, episode_return=3.0)]) == [3.0]
    with pytest.raises(ValueError, match="known estimators: grpo, rloo, gigpo"):
        advantages([], estimator="ppo")
