"""Success with its interval, overall and per kind of task, and the rows of the paper's tables."""

import itertools
import statistics
from contextlib import ExitStack
from dataclasses import replace

import pytest

from paw.config.sections import EndpointConfig
from paw.errors import UserError
from paw.rollouts.attempts import (
    Game,
    attempt_lines,
    attempt_metrics,
    best_of,
    bootstrap,
    evaluation_metrics,
    pass_at,
    share_interval,
    shares_by_kind,
    sizes,
)
from paw.rollouts.success import kinds, success_metrics, wilson
from paw.tools.evaluate import evaluate
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


def test_pass_at_k_and_best_of_k_are_means_over_all_draws():
    wins = [True, False, False, True, False]
    scores = [0.1, 0.9, 0.4, 0.4, -1.0]
    for k in range(1, 6):
        draws = list(itertools.combinations(range(5), k))
        passed = [any(wins[i] for i in draw) for draw in draws]
        best = [max(scores[i] for i in draw) for draw in draws]
        assert pass_at(k, attempts=5, successes=2) == pytest.approx(sum(passed) / len(draws))
        assert best_of(k, scores) == pytest.approx(sum(best) / len(draws))
    assert [sizes(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    for k in (0, 6):
        with pytest.raises(ValueError, match=f"got {k}"):
            pass_at(k, attempts=5, successes=2)
        with pytest.raises(ValueError, match=f"got {k}"):
            best_of(k, scores)


def test_intervals_are_over_games():
    assert share_interval([1.0, 0.0, 1.0, 1.0]) == wilson(3, 4), "one attempt: as ever"
    assert share_interval([1.0] * 8) == wilson(8, 8), "not [1, 1]"
    assert share_interval([0.25]) == (0.0, 1.0)
    shares = [0.25, 0.5, 0.75, 1.0, 0.0, 0.25, 0.5, 0.75] * 8
    low, high = share_interval(shares)
    assert (low, high) == share_interval(shares), "seeded"
    half_width = 1.96 * statistics.pstdev(shares) / len(shares) ** 0.5
    assert (low, high) == pytest.approx((0.5 - half_width, 0.5 + half_width), abs=0.01)
    assert bootstrap([0.7] * 3) == pytest.approx((0.7, 0.7))


def test_failed_attempts_count_as_attempts_without_success():
    pick, heat, lost = Task("1", "pick"), Task("2", "heat"), Task("3", "heat")
    groups = [
        Group(pick, [make_episode(pick, won=True), make_episode(pick, won=False)]),
        Group(heat, [make_episode(heat, won=True)], index=1),
    ]
    failed = [Trajectory(heat, 1, failure="boom")]
    failed += [Trajectory(lost, member, failure="boom") for member in range(2)]

    metrics = evaluation_metrics(groups, failed, attempts=2)
    assert metrics["games"] == 3.0
    assert metrics["attempts"] == 2.0
    assert metrics["failures"] == 3.0
    assert metrics["success"] == metrics["pass_at_1"] == pytest.approx((0.5 + 0.5 + 0.0) / 3)
    assert metrics["pass_at_2"] == pytest.approx(2 / 3)
    assert (metrics["pass_at_2_low"], metrics["pass_at_2_high"]) == wilson(2, 3)
    assert metrics["best_at_1"] == pytest.approx((5.0 + 5.0 + 0.0) / 3), "returns, as no scores"
    assert metrics["best_at_2"] == pytest.approx(20 / 3)
    shares = shares_by_kind(groups, failed, attempts=2)
    assert shares == [("pick", 0.5), ("heat", 0.5), ("heat", 0.0)]
    assert not evaluation_metrics(groups, failed, attempts=1).keys() & {"attempts", "pass_at_1"}
    assert evaluation_metrics([], failed, attempts=2)["pass_at_2"] == 0.0


def test_several_environments_have_pass_at_k_and_intervals_of_their_own():
    """Attempts at a game are not independent, so the intervals are over games there too."""
    tasks = [Task(str(n), "pick").in_env("house") for n in range(3)]
    quiz, lost = (Task(name, "nq").in_env("quiz") for name in ("0", "1"))
    groups = []
    for index, task in enumerate(tasks):
        members = [make_episode(task, won=won) for won in (index > 0, index > 1)]
        groups.append(Group(task, members, index))
    answers = [make_episode(quiz, won=won) for won in (True, False)]
    for episode in answers:
        last = episode.turns[-1]
        last.outcome = replace(last.outcome, score=0.25)
    groups.append(Group(quiz, answers, 3))
    failed = [Trajectory(lost, member, failure="boom") for member in range(2)]

    metrics = evaluation_metrics(groups, failed, attempts=2)
    assert metrics["success_house"] == metrics["pass_at_1_house"] == 0.5
    assert (metrics["ci_low_house"], metrics["ci_high_house"]) == share_interval([0.0, 0.5, 1.0])
    assert metrics["pass_at_2_house"] == pytest.approx(2 / 3)
    assert (metrics["pass_at_2_low_house"], metrics["pass_at_2_high_house"]) == wilson(2, 3)
    assert metrics["pass_at_2_quiz"] == 0.5
    assert metrics["best_at_2_house"] == pytest.approx(20 / 3), "its own returns: it has no score"
    assert metrics["best_at_2_quiz"] == 0.125
    assert shares_by_kind(groups, failed, attempts=2)[-2:] == [("quiz/nq", 0.0), ("quiz", 0.0)]

    lines = attempt_lines(metrics | {"envs": ["house", "quiz"]})
    low, high = wilson(2, 3)
    assert lines[2] == "  house:"
    assert lines[4].startswith(
        f"    pass@2     66.7% ({low:.1%} to {high:.1%})   best of 2    6.667"
    )

    only_lost = success_metrics([], failed) | success_metrics(groups[:1], failed)
    assert (only_lost["ci_low_quiz"], only_lost["ci_high_quiz"]) == wilson(0, 2)


def test_larger_k_takes_only_games_with_as_many_attempts():
    games = [Game("a", 4, 1, (1.0, 0.0, 0.0, 0.0)), Game("a", 1, 1, (1.0,))]
    metrics = attempt_metrics(games)
    assert metrics["pass_at_1"] == 0.625
    assert metrics["pass_at_2"] == 0.5
    assert attempt_lines(metrics)[1] == ("  pass@2     50.0% (0.0% to 100.0%)   best of 2    0.500")
    assert attempt_metrics([]) == {}


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
    assert failed == "1 episodes could not be played and are not counted above"
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


def test_attempts_of_an_agent_are_counted_by_game():
    lines = []
    for place, (success, score) in enumerate([(True, 1.0), (False, 0.2), (False, 0.0)]):
        lines.append(episode_line("shop", success, score=score) | {"place": place})
    about = {"env.name": "webshop", "agent.type": "react", "model": "m", "games": "these"}
    about |= {"eval.temperature": 0.4, "eval.attempts": 2}
    summary = summarise(lines, about, EndpointConfig(), 9.0)
    assert summary["games"] == "these"
    assert summary["pass_at_1"] == summary["success"] == 0.25
    assert summary["pass_at_2"] == 1.0, "the second game has one attempt so far"
    assert summary["best_at_1"] == pytest.approx((0.6 + 0.0) / 2)
    assert "pass@2    100.0%" in table(summary)

    lines = [
        episode_line("toys/a", True, score=1.0) | {"place": 0},
        episode_line("toys/a", False, score=0.5) | {"place": 1},
        episode_line("house/b", False) | {"place": 2, "return": 3.0},
    ]
    about["envs"] = [{"label": "toys"}, {"label": "house"}]
    summary = summarise(lines, about, EndpointConfig(), 9.0)
    assert summary["score"] == 0.75, "of the environment that has scores"
    assert (summary["pass_at_2_toys"], summary["best_at_1_house"]) == (1.0, 3.0)
    assert "\ntoys:\npass@1     50.0%" in table(summary)


def test_a_folder_without_episodes_takes_other_settings(tmp_path):
    """An evaluation may fail before it plays any, because of the very setting that is changed."""

    def begin(value):
        with ExitStack() as stack:
            evaluate._open(stack, tmp_path, {"eval.games": 2, "eval.seed": value})

    begin(1)
    begin(2)
    (tmp_path / "episodes.jsonl").write_text("{}\n")
    begin(2)
    with pytest.raises(UserError, match=r"holds an evaluation with eval\.seed = 2, not 3"):
        begin(3)
