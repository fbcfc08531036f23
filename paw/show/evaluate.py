"""Evaluation: success on held-out games, overall and per task type, with Wilson intervals."""

import math

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


def success_metrics(groups: list[Group], *, prefix: str) -> dict[str, float]:
    """`<prefix>/success`, `.../success_<kind>`, interval, return, steps and share of valid actions of the episodes."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for episode in episodes for turn in episode.turns]
    n = len(episodes)
    won = sum(episode.won for episode in episodes)
    low, high = wilson(won, n)
    metrics = {
        f"{prefix}/success": won / max(1, n),
        f"{prefix}/ci_low": low,
        f"{prefix}/ci_high": high,
        f"{prefix}/games": float(n),
        f"{prefix}/return": sum(e.episode_return for e in episodes) / max(1, n),
        f"{prefix}/steps": len(turns) / max(1, n),
        f"{prefix}/valid_actions": sum(turn.outcome.valid for turn in turns) / max(1, len(turns)),
    }
    for kind, wins in success_by_kind(groups).items():
        metrics[f"{prefix}/success_{kind}"] = sum(wins) / len(wins)
    return metrics


def success_by_kind(groups: list[Group]) -> dict[str, list[bool]]:
    wins: dict[str, list[bool]] = {}
    for group in groups:
        wins.setdefault(group.task.kind, []).extend(t.won for t in group.trajectories)
    return {kind: wins[kind] for kind in sorted(wins) if wins[kind]}
