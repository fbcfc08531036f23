"""Success with its interval, overall and per kind of task."""

import pytest

from paw.rollout.success import kinds, success_metrics, wilson
from paw.tools.results import kind_lines, kind_rows
from paw.types import Group, Outcome, Task, Trajectory, Turn


def test_wilson_intervals_as_published():
    published = {
        (8, 10): (0.4902, 0.9433), (0, 10): (0.0, 0.2775), (0, 0): (0.0, 1.0),
        (15, 148): (0.0624, 0.1605), (81, 263): (0.2553, 0.3662),  # Newcombe 1998, Table I
    }  # fmt: skip
    for (successes, n), interval in published.items():
        assert wilson(successes, n) == pytest.approx(interval, abs=6e-5)


def make_episode(task, *, won, turns=2, valid=True):
    def turn(last):
        outcome = Outcome("o", 10.0 if won and last else 0.0, last, won and last, "look", valid)
        return Turn([1], [2], [-0.5], None, "p", "r", outcome, "a", 0)

    return Trajectory(task, 0, [turn(t == turns - 1) for t in range(turns)])


def make_groups():
    pick, heat, other = Task("1", "pick"), Task("2", "heat"), Task("3", "pick")
    return [
        Group(pick, [make_episode(pick, won=True, turns=4)]),
        Group(heat, [make_episode(heat, won=False, valid=False)]),
        Group(other, [make_episode(other, won=False), make_episode(other, won=True, turns=4)]),
    ]


def test_metrics_overall_and_per_kind():
    metrics = success_metrics([*make_groups(), Group(Task("4", "cool"), [])])
    low, high = wilson(2, 4)
    assert metrics == {
        "success": 0.5, "ci_low": low, "ci_high": high, "games": 4.0, "failures": 0.0, "return": 5.0, "steps": 3.0,
        "valid_actions": 10 / 12, "success_heat": 0.0, "success_pick": pytest.approx(2 / 3),
    }  # fmt: skip
    assert success_metrics([]) == {"games": 0.0, "failures": 0.0}
    assert list(kind_rows(kinds(make_groups()))) == ["heat", "pick"] and kind_lines(kind_rows([])) == []


def test_the_seven_sets_are_a_table_with_their_average():
    """Table 2's names and order; each set weighs the same, and what is none of them is not averaged."""
    played = {"bamboogle": [1, 0], "own": [0], "nq": [1, 1, 1, 0], "2wikimultihopqa": [0]}
    groups = [
        Group(task, [make_episode(task, won=bool(won))])
        for kind, wins in played.items()
        for i, won in enumerate(wins)
        for task in [Task(f"{kind}/{i}", kind)]
    ]
    table = kind_rows(kinds(groups))
    assert list(table) == ["NQ", "2Wiki", "Bamboogle", "own", "Avg."]
    low, high = wilson(3, 4)
    assert table["NQ"] == {"success": 0.75, "ci_low": low, "ci_high": high, "games": 4}
    assert table["Avg."] == {"success": pytest.approx((0.75 + 0.0 + 0.5) / 3), "sets": 3}
    lines = kind_lines(table)
    assert lines[0] == f"  NQ          75.0% of 4 ({low:.1%} to {high:.1%})"
    assert lines[-1] == "  Avg.        41.7% of 3 sets"
