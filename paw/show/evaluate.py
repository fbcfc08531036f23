"""Evaluation: success on held-out games, overall and per task type, with Wilson intervals."""

import math
from collections.abc import Iterable

from paw.experience.envs.search.data import SETS
from paw.types import Group


def wilson(successes: int, n: int, *, z: float = 1.96) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion.

    >>> [round(x, 3) for x in wilson(8, 10)]
    [0.49, 0.943]
    """
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def success_metrics(groups: list[Group]) -> dict[str, float]:
    """Of the episodes: success, its interval, games, return, steps, share of valid actions, and success_<kind>.

    Also the mean score of their last turns, where the environment scores them.
    """
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for episode in episodes for turn in episode.turns]
    n, won = len(episodes), sum(episode.won for episode in episodes)
    low, high = wilson(won, n)
    scores = [score for e in episodes if e.turns and (score := e.turns[-1].outcome.score) is not None]
    by_kind: dict[str, list[bool]] = {}
    for episode in episodes:
        by_kind.setdefault(episode.task.kind, []).append(episode.won)
    return {
        "success": won / max(1, n),
        "ci_low": low,
        "ci_high": high,
        "games": float(n),
        "return": sum(e.episode_return for e in episodes) / max(1, n),
        "steps": len(turns) / max(1, n),
        "valid_actions": sum(turn.outcome.valid for turn in turns) / max(1, len(turns)),
        **({"score": sum(scores) / len(scores)} if scores else {}),
        **{f"success_{kind}": sum(wins) / len(wins) for kind, wins in sorted(by_kind.items())},
    }


def kind_table(groups: list[Group]) -> dict[str, dict[str, float]]:
    """`kind_rows` of the episodes."""
    return kind_rows((episode.task.kind, episode.won) for group in groups for episode in group.trajectories)


def kind_rows(episodes: Iterable[tuple[str, bool]]) -> dict[str, dict[str, float]]:
    """Success, its interval and the games of each kind of task, those of search QA by their names and order in Table 2.

    `episodes` are (kind, whether won). Where there are any of search QA, "Avg." is the mean over the sets, each of the
    same weight.
    """
    won: dict[str, list[bool]] = {}
    for kind, success in episodes:
        won.setdefault(kind, []).append(success)
    table = {}
    for kind in [*(kind for kind in SETS if kind in won), *sorted(won.keys() - SETS.keys())]:
        low, high = wilson(sum(won[kind]), len(won[kind]))
        row = {"success": sum(won[kind]) / len(won[kind]), "ci_low": low, "ci_high": high, "games": len(won[kind])}
        table[SETS.get(kind, kind)] = row
    sets = [table[name]["success"] for name in SETS.values() if name in table]
    return table | ({"Avg.": {"success": sum(sets) / len(sets), "sets": len(sets)}} if sets else {})


def kind_lines(table: dict[str, dict[str, float]]) -> list[str]:
    """`kind_table` for people, a line each."""
    width = max(map(len, table), default=0)
    lines = []
    for name, row in table.items():
        of = (
            f"of {row['sets']} sets"
            if "sets" in row
            else f"of {row['games']} ({row['ci_low']:.1%} to {row['ci_high']:.1%})"
        )
        lines.append(f"  {name:<{width}}  {row['success']:6.1%} {of}")
    return lines
