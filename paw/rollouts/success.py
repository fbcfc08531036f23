"""Success on held-out games, overall and per task type, with Wilson intervals."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from paw.config.sections import Config
from paw.envs.base import kind_name
from paw.types import Group, Task, Trajectory


def wilson(successes: int, n: int, *, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion.

    >>> [round(x, 3) for x in wilson(8, 10)]
    [0.49, 0.943]
    """
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    z2 = z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half_width = z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def success_metrics(groups: list[Group], failed: Sequence[Trajectory] = ()) -> dict[str, Any]:
    """Return counts and means of an evaluation, by name.

    The names are games, failures, failure (why the first of the `failed` episodes failed), success
    with ci_low and ci_high, return, steps, valid_actions, score (if the environment has one) and
    success_<kind>. With [[envs]], there are also return_<label>, success_<label>, ci_low_<label>
    and ci_high_<label>; with [[rewards]], rewards_<label>. `failed` episodes count as games without
    success, and the other means leave them out. If no episode ended, only the first three are
    returned.
    """
    episodes: list[Trajectory] = []
    for group in groups:
        episodes += group.trajectories
    games = len(episodes) + len(failed)
    metrics: dict[str, Any] = {"games": float(games), "failures": float(len(failed))}
    if failed:
        metrics["failure"] = failed[0].failure
    if not episodes:
        return metrics

    successes = sum(episode.won for episode in episodes)
    metrics["success"] = successes / games
    metrics["ci_low"], metrics["ci_high"] = wilson(successes, games)

    summaries = [episode.summary for episode in episodes]
    turns = sum(summary.turns for summary in summaries)
    valid_turns = sum(summary.valid_turns for summary in summaries)
    metrics["return"] = sum(summary.episode_return for summary in summaries) / len(episodes)
    metrics["steps"] = turns / len(episodes)
    metrics["valid_actions"] = valid_turns / max(1, turns)

    scores = [summary.score for summary in summaries if summary.score is not None]
    if scores:
        metrics["score"] = sum(scores) / len(scores)

    values_by_reward: dict[str, list[float]] = defaultdict(list)
    for summary in summaries:
        for label, value in summary.rewards.items():
            values_by_reward[label].append(value)
    for label, values in values_by_reward.items():
        metrics[f"rewards_{label}"] = sum(values) / len(values)

    wins_by_kind: dict[str, list[bool]] = defaultdict(list)
    for kind, won in kinds(groups, failed):
        wins_by_kind[kind].append(won)
    for kind, wins in sorted(wins_by_kind.items()):
        metrics[f"success_{kind}"] = sum(wins) / len(wins)
    return metrics | _metrics_by_environment(groups, failed)


def groups_by_environment(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups of each of several environments, by label; {} in a run with one."""
    by_label: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.task.env:
            by_label[group.task.env].append(group)
    return dict(sorted(by_label.items()))


def _metrics_by_environment(
    groups: Sequence[Group], failed: Sequence[Trajectory]
) -> dict[str, float]:
    """Return the interval of success and the mean return of each of several environments.

    An environment whose episodes have all failed has an interval, but no return.
    """
    metrics: dict[str, float] = {}
    groups_by_label = groups_by_environment(groups)
    failed_labels = [episode.task.env for episode in failed if episode.task.env]
    for label in sorted({*groups_by_label, *failed_labels}):
        own_groups = groups_by_label.get(label, [])
        episodes = [episode for group in own_groups for episode in group.trajectories]
        games = len(episodes) + failed_labels.count(label)
        wins = sum(episode.won for episode in episodes)
        metrics[f"ci_low_{label}"], metrics[f"ci_high_{label}"] = wilson(wins, games)
        if episodes:
            metrics[f"return_{label}"] = sum(e.episode_return for e in episodes) / len(episodes)
    return metrics


def success_text(metrics: Mapping[str, Any]) -> str:
    """Describe success for people, from `success_metrics`.

    Examples: "25.0% of 8 games, 6 failed (RuntimeError: boom)", "25.0% of 8 games with 4 attempts
    each".

    >>> success_text({"success": 1.0, "games": 1, "failures": 0})
    '100.0% of 1 game'
    """
    share = f"{metrics['success']:.1%}" if "success" in metrics else "none"
    noun = "game" if metrics["games"] == 1 else "games"
    text = f"{share} of {metrics['games']:.0f} {noun}"
    if "attempts" in metrics:
        text += f" with {metrics['attempts']:.0f} attempts each"
    if metrics["failures"]:
        text += f", {metrics['failures']:.0f} failed ({metrics['failure']})"
    return text


def more_context(config: Config) -> str:
    """Say what to do if episodes run out of context."""
    longer = f"raise rollout.max_prompt_tokens = {config.rollout.max_prompt_tokens}"
    if config.endpoint.url:
        longer = f"serve {config.endpoint.model} with a longer one"
    return f"{longer}, or lower env.max_turns = {config.env.max_turns}"


def kinds(groups: list[Group], failed: Sequence[Trajectory] = ()) -> list[tuple[str, bool]]:
    """Return (kind of task, whether won) of every episode. `failed` ones count as not won.

    With several environments, the label of its environment is a second kind of each episode.
    """
    ended: list[tuple[Task, bool]] = []
    for group in groups:
        ended += [(episode.task, episode.won) for episode in group.trajectories]
    ended += [(episode.task, False) for episode in failed]

    kind_rows: list[tuple[str, bool]] = []
    for task, won in ended:
        kind_rows.append((kind_name(task.kind), won))
        if task.env:
            kind_rows.append((task.env, won))
    return kind_rows
