"""Success with its interval, overall and per kind of task, and the rows of the paper's tables."""

import pytest

from paw.config.sections import EndpointConfig
from paw.rollouts.success import kinds, success_metrics, wilson
from paw.tools.evaluate.results import kind_lines, kind_rows, summarise, table
from paw.types import Group, Outcome, Task, Trajectory, Turn


def test_wilson_intervals_as_published():
    published = {
        (8, 10): (0.4902, 0.9433), (0, 10): (0.0, 0.2775), (0, 0): (0.0, 1.0),
        (15, 148): (0.0624, 0.1605), (81, 263): (0.2553, 0.3662),  # Newcombe 1998, Table I
    }  # fmt: skip
    for (successes, n), interval in published.items():
        assert wilson(successes, n) == pytest.approx(interval, abs=6e-5)


def make_episode(task, *, won, turns=2, valid=True):
    def turn(is_last):
        outcome = Outcome(
            "o", 10.0 if won and is_last else 0.0, is_last, won and is_last, "look", valid
        )
        return Turn([1], [2], [-0.5], None, "p", "r", outcome, "a", 0)

    return Trajectory(task, 0, [turn(t == turns - 1) for t in range(turns)])


def make_groups():
    pick = Task("1", "pick")
    heat = Task("2", "heat")
    other = Task("3", "pick")
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
    assert list(kind_rows(kinds(make_groups()))) == ["heat", "pick"]
    assert kind_lines(kind_rows([])) == []


def episode_line(kind, success, *, score=None, failure=None):
    turns = [{"valid": True}, {"valid": success}]
    spent = {
        "calls": 2,
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "cost": 0.25,
        "seconds": 1.5,
    }
    return {"kind": kind, "success": success, "score": score, "steps": 2, "turns": turns, "context_full": False,
            "failure": failure, **spent}  # fmt: skip


def row(environment, lines):
    about = {
        "env.name": environment,
        "agent.type": "react",
        "model": "m",
        "games": "these",
        "eval.temperature": 0.4,
    }
    summary = summarise(lines, about, EndpointConfig(input_price=1.0), 9.0)
    return table(summary).splitlines()


def test_rows_as_in_the_papers_tables():
    kinds = ("two", "pick", "look")
    lines = [
        episode_line(kind, won) for kind in kinds for won in (True, False, False, kind == "pick")
    ]
    # Counts nowhere but costs.
    lines.append(episode_line("pick", False, failure="EndpointError: down"))
    head, _, cells, _, success, rest, failed = row("alfworld", lines)
    assert head == "| Model | Agent | Pick | Look | Pick2 | All |"
    assert cells == "| m | react | 50.0 | 25.0 | 25.0 | 33.3 |"
    low, high = wilson(4, 12)
    interval = f"(95 % interval {low:.1%} to {high:.1%})"
    assert success == f"these, temperature 0.4: success 33.3% of 12 episodes {interval}"
    assert rest == (
        "2.0 turns an episode, valid actions 66.7%; 26 calls, 1300 prompt and 130 completion tokens, $3.25; "
        "20 s of episodes, 9 s by the clock in this run"
    )
    assert failed == "1 episodes could not be played and count nowhere above"
    sales = [
        ("toys", True, 1.0),
        ("toys", False, 0.6),
        ("shoes", False, None),
    ]  # the last one never took a step
    shop = row("webshop", [episode_line(kind, won, score=score) for kind, won, score in sales])
    assert shop[0] == "| Model | Agent | Score | Succ. |"
    assert shop[2] == "| m | react | 53.3 | 33.3 |"
    played = {"bamboogle": [1, 0], "own": [0], "nq": [1, 1, 1, 0], "2wikimultihopqa": [0]}
    search = row(
        "search", [episode_line(kind, bool(won)) for kind, wins in played.items() for won in wins]
    )
    # Of Table 2's sets, each the same.
    assert search[0] == "| Model | Agent | NQ | 2Wiki | Bamboogle | own | Avg. |"
    assert search[2] == "| m | react | 75.0 | 0.0 | 50.0 | 0.0 | 41.7 |"
    rows = kind_rows((kind, bool(won)) for kind, wins in played.items() for won in wins)
    lines = kind_lines(rows)
    (low, high) = wilson(3, 4)
    assert rows["NQ"] == {"success": 0.75, "ci_low": low, "ci_high": high, "games": 4}
    assert rows["Avg."] == {"success": pytest.approx((0.75 + 0.0 + 0.5) / 3), "sets": 3}
    assert lines[0] == f"  NQ          75.0% of 4 ({low:.1%} to {high:.1%})"
    assert lines[-1] == "  Avg.        41.7% of 3 sets"
