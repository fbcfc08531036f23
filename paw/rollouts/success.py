"""Success on held-out games, overall and per task type, with Wilson intervals."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paw.config import Config
from paw.envs.base import kind_name
from paw.types import Group, Trajectory


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


def success_metrics(groups: list[Group], failed: Sequence[Trajectory] = ()) -> dict[str, Any]:
    """Of the episodes: games, failures, success with its interval, return, steps, valid actions, success_<kind>, score.

    Those that `failed` are among the games and not successful, and "failure" is why the first did; other means leave
    them out. Where no episode ended, games, failures and failure are all there is.
    """
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    by_kind: dict[str, list[bool]] = {}
    for kind, success in kinds(groups, failed):
        by_kind.setdefault(kind, []).append(success)
    won, n = sum(episode.won for episode in episodes), len(episodes) + len(failed)
    counts = {"games": float(n), "failures": float(len(failed)), **({"failure": failed[0].failure} if failed else {})}
    if not episodes:
        return counts
    turns = [turn for episode in episodes for turn in episode.turns]
    scores = [score for e in episodes if e.turns and (score := e.turns[-1].outcome.score) is not None]
    low, high = wilson(won, n)
    return {
        **counts,
        "success": won / n,
        "ci_low": low,
        "ci_high": high,
        "return": sum(e.episode_return for e in episodes) / len(episodes),
        "steps": len(turns) / len(episodes),
        "valid_actions": sum(turn.outcome.valid for turn in turns) / max(1, len(turns)),
        **({"score": sum(scores) / len(scores)} if scores else {}),
        **{f"success_{kind}": sum(wins) / len(wins) for kind, wins in sorted(by_kind.items())},
    }


def success_text(metrics: Mapping[str, Any]) -> str:
    """Success as people read it, from `success_metrics`: "25.0% of 8 games, 6 failed (RuntimeError: boom)"."""
    share = f"{metrics['success']:.1%}" if "success" in metrics else "none"
    failed = f", {metrics['failures']:.0f} failed ({metrics['failure']})" if metrics["failures"] else ""
    return f"{share} of {metrics['games']:.0f} games{failed}"


def more_context(config: Config) -> str:
    """What helps if episodes run out of context."""
    longer = f"raise rollout.max_prompt_tokens = {config.rollout.max_prompt_tokens}"
    if config.endpoint.url:
        longer = f"serve {config.endpoint.model} with a longer one"
    return f"{longer}, or lower env.max_turns = {config.env.max_turns}"


def kinds(groups: list[Group], failed: Sequence[Trajectory] = ()) -> list[tuple[str, bool]]:
    """(kind of task, whether won) of every episode; those that `failed` are not successful."""
    ended = [(kind_name(episode.task.kind), episode.won) for group in groups for episode in group.trajectories]
    return ended + [(kind_name(episode.task.kind), False) for episode in failed]
