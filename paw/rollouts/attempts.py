"""Several attempts at each evaluation game: pass@k and best-of-k, with intervals over games.

pass@k is the chance that at least one of k attempts at a game succeeds. It is estimated without
bias from n >= k attempts (Chen et al. 2021, arXiv 2107.03374, Eq. (1)). Best-of-k is the expected
highest score of k attempts. Attempts at a game are not independent of one another, so intervals
come from resampling games, never attempts.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paw.envs.base import kind_name
from paw.rollouts.success import kinds, success_metrics, wilson
from paw.types import Group, Trajectory

RESAMPLES = 2_000
"""Bootstrap samples of an interval."""
BLOCK = 1 << 20
"""Maximum number of values of bootstrap samples in memory at once."""
SEED = 0
"""Seed of the bootstrap, so that the same episodes always have the same interval."""


@dataclass(frozen=True)
class Game:
    """The attempts at one game."""

    kind: str
    attempts: int
    successes: int
    scores: tuple[float, ...]
    """The score of each attempt: the environment's own score in [0, 1], or the return if it has
    none."""
    env: str = ""
    """The label of its environment in a run with several."""

    @property
    def success(self) -> float:
        """The share of attempts that succeeded."""
        return self.successes / self.attempts


def pass_at(k: int, *, attempts: int, successes: int) -> float:
    """Return the chance that k attempts, drawn without replacement, include a success.

    This is 1 - C(n - c, k) / C(n, k) for n attempts with c successes, the unbiased estimator of
    pass@k (arXiv 2107.03374, Eq. (1)). Raises ValueError for k outside 1 to n.

    >>> pass_at(2, attempts=4, successes=1)
    0.5
    """
    if not 1 <= k <= attempts:
        raise ValueError(f"k must be from 1 to the {attempts} attempts, got {k}")
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def best_of(k: int, scores: Sequence[float]) -> float:
    """Return the expected highest of k scores, drawn without replacement.

    The i-th lowest of n scores is the highest in C(i - 1, k - 1) of the C(n, k) draws. Raises
    ValueError for k outside 1 to n.

    >>> best_of(2, [0.0, 0.5, 1.0])
    0.8333333333333334
    """
    attempts = len(scores)
    if not 1 <= k <= attempts:
        raise ValueError(f"k must be from 1 to the {attempts} scores, got {k}")
    weighted_sum = 0.0
    for rank, score in enumerate(sorted(scores), start=1):
        weighted_sum += score * math.comb(rank - 1, k - 1)
    return weighted_sum / math.comb(attempts, k)


def sizes(attempts: int) -> list[int]:
    """Return the values of k that are reported: 1, 2, 4, ... and the number of attempts.

    >>> sizes(6)
    [1, 2, 4, 6]
    """
    powers = [1 << exponent for exponent in range(attempts.bit_length())]
    return sorted({*powers, attempts} & set(range(1, attempts + 1)))


def share_interval(shares: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of a share of each game.

    It is the Wilson interval if each share is 0 or 1, as with one attempt at each game. Otherwise
    it is a bootstrap over games. One game has no spread over games: its interval is (0, 1).
    """
    if all(share in (0.0, 1.0) for share in shares):
        return wilson(round(sum(shares)), len(shares))
    if len(shares) < 2:
        return 0.0, 1.0
    return bootstrap(shares)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % percentiles of the mean over resampled `values`.

    The values are those of games, at least one. The result is the same at every call.
    """
    array = np.asarray(values, np.float64)
    task_count = len(array)
    rng = np.random.default_rng(SEED)
    block = max(1, BLOCK // task_count)
    means: list[np.ndarray] = []
    for first_resample in range(0, RESAMPLES, block):
        resample_count = min(block, RESAMPLES - first_resample)
        means.append(
            array[rng.integers(task_count, size=(resample_count, task_count))].mean(axis=1)
        )
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


def games_of(groups: Sequence[Group], failed: Sequence[Trajectory], attempts: int) -> list[Game]:
    """Return the games of an evaluation with `attempts` at each.

    An attempt without a trajectory in its group has failed. It counts as unsuccessful and has the
    score 0. A game whose attempts all failed appears only in `failed`.
    """
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    scored_envs = {episode.task.env for episode in episodes if episode.summary.score is not None}
    games: list[Game] = []
    failures = Counter(trajectory.task.id for trajectory in failed)
    failed_tasks = {trajectory.task.id: trajectory.task for trajectory in failed}

    for group in groups:
        scores: list[float] = []
        for trajectory in group.trajectories:
            summary = trajectory.summary
            has_score = group.task.env in scored_envs
            scores.append((summary.score or 0.0) if has_score else summary.episode_return)
        missing = attempts - len(scores)
        failures[group.task.id] -= missing
        games.append(
            Game(
                kind=kind_name(group.task.kind),
                attempts=attempts,
                successes=sum(trajectory.won for trajectory in group.trajectories),
                scores=(*scores, *[0.0] * missing),
                env=group.task.env,
            )
        )

    for task_id, failure_count in failures.items():
        for _ in range(failure_count // attempts):  # a task may have been drawn more than once
            task = failed_tasks[task_id]
            game = Game(
                kind=kind_name(task.kind),
                attempts=attempts,
                successes=0,
                scores=(0.0,) * attempts,
                env=task.env,
            )
            games.append(game)
    return games


def evaluation_metrics(
    groups: list[Group], failed: Sequence[Trajectory], *, attempts: int
) -> dict[str, Any]:
    """Return `success_metrics` of an evaluation with `attempts` at each game.

    With several attempts, `games` is the number of games, and success and its interval are over
    games. pass@k and best-of-k are added (`attempt_metrics`), with [[envs]] also those of each
    environment.
    """
    metrics = success_metrics(groups, failed)
    if attempts > 1:
        games = games_of(groups, failed, attempts)
        metrics |= attempt_metrics(games) | metrics_by_environment(games)
    return metrics


def shares_by_kind(
    groups: list[Group], failed: Sequence[Trajectory], *, attempts: int
) -> list[tuple[str, float]]:
    """Return (kind of task, share of attempts that succeeded) of every game.

    With several environments, the label of its environment is a second kind of each game.
    """
    if attempts == 1:
        return [(kind, float(won)) for kind, won in kinds(groups, failed)]
    shares: list[tuple[str, float]] = []
    for game in games_of(groups, failed, attempts):
        shares.append((game.kind, game.success))
        if game.env:
            shares.append((game.env, game.success))
    return shares


def attempt_metrics(games: Sequence[Game]) -> dict[str, Any]:
    """Return success with its interval, pass@k and best-of-k of games with several attempts.

    The keys are games, attempts, success, ci_low and ci_high, and for every k of `sizes` pass_at_k,
    pass_at_k_low, pass_at_k_high, and the same for best_at_k, whose interval is absent if there is
    one game. Only games with at least k attempts count for k. Returns {} without games.
    """
    if not games:
        return {}
    shares = [game.success for game in games]
    low, high = share_interval(shares)
    most_attempts = max(game.attempts for game in games)
    metrics: dict[str, Any] = {
        "games": float(len(games)),
        "attempts": float(most_attempts),
        "success": sum(shares) / len(shares),
        "ci_low": low,
        "ci_high": high,
    }
    for k in sizes(most_attempts):
        counted = [game for game in games if game.attempts >= k]
        passes = [pass_at(k, attempts=g.attempts, successes=g.successes) for g in counted]
        metrics[f"pass_at_{k}"] = sum(passes) / len(passes)
        metrics[f"pass_at_{k}_low"], metrics[f"pass_at_{k}_high"] = share_interval(passes)

        scores = [best_of(k, game.scores) for game in counted]
        metrics[f"best_at_{k}"] = sum(scores) / len(scores)
        if len(scores) > 1:
            metrics[f"best_at_{k}_low"], metrics[f"best_at_{k}_high"] = bootstrap(scores)
    return metrics


def metrics_by_environment(games: Sequence[Game]) -> dict[str, float]:
    """Return `attempt_metrics` of each of several environments; their names end with its label.

    The numbers of games and attempts are left out. Returns {} if there is one environment.
    """
    games_by_label: dict[str, list[Game]] = {}
    for game in games:
        if game.env:
            games_by_label.setdefault(game.env, []).append(game)

    metrics: dict[str, float] = {}
    for label, own_games in sorted(games_by_label.items()):
        for name, value in attempt_metrics(own_games).items():
            if name not in ("games", "attempts"):
                metrics[f"{name}_{label}"] = value
    return metrics


def attempt_lines(metrics: dict[str, Any]) -> list[str]:
    """Return pass@k and best-of-k of an evaluation as text, one line for each k.

    If there are several environments (their labels are `metrics["envs"]`), lines for each follow.
    """
    lines = _lines_of(metrics, "")
    for label in metrics.get("envs", []):
        own_lines = _lines_of(metrics, f"_{label}")
        if own_lines:
            lines += [f"  {label}:", *(f"  {line}" for line in own_lines)]
    return lines


def _lines_of(metrics: dict[str, Any], suffix: str) -> list[str]:
    """Return a line for each k of the metrics whose names end with `suffix`."""
    lines: list[str] = []
    for k in sizes(round(metrics.get("attempts", 0))):
        passed = metrics.get(f"pass_at_{k}{suffix}")
        if passed is None:
            continue
        low = metrics[f"pass_at_{k}_low{suffix}"]
        high = metrics[f"pass_at_{k}_high{suffix}"]
        best = metrics[f"best_at_{k}{suffix}"]
        line = f"  pass@{k:<4} {passed:6.1%} ({low:.1%} to {high:.1%})   best of {k:<4} {best:.3f}"
        best_low = metrics.get(f"best_at_{k}_low{suffix}")
        if best_low is not None:
            best_high = metrics[f"best_at_{k}_high{suffix}"]
            line += f" ({best_low:.3f} to {best_high:.3f})"
        lines.append(line)
    return lines
