"""Group-relative advantages: one scalar a row, broadcast to its response tokens; and those of PPO, one a token.

GRPO (arXiv 2402.03300) and its Dr. GRPO form, RLOO (arXiv 2402.14740), GiGPO (arXiv 2505.10978), with the semantics of
GiGPO's public code (verl-agent, commit 796ed31), which the paper's baselines ran. A row's score is its episode return
less its own invalid penalty. Rows come in group, trajectory, step order, and answers are in the same order.
PPO's advantages, one a token, are at the end: `learner.critic` has the values they start from.

Worked example. One group: trajectory A wins 10 in two steps; B fails in three, its second step invalid (-0.1).
Scores are [10, 10 | 0, -0.1, 0]; GRPO over steps gives [1.095, 1.095 | -0.724, -0.742, -0.724].
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Literal

from paw.types import Row

Stat = Literal["steps", "trajectories"]


def advantages(
    rows: Sequence[Row],
    *,
    estimator: Literal["grpo", "rloo", "gigpo"] = "grpo",
    stat: Stat = "steps",
    norm_std: bool = True,
    eps: float = 1e-6,
    penalty_only: Literal["keep", "drop"] = "keep",
    gigpo_norm: Literal["mean_std", "mean"] = "mean_std",
    omega: float = 1.0,
    gamma: float = 0.95,
    similarity: float | None = None,
) -> list[float]:
    """Advantage of each row under the chosen estimator; the options are those of the `[advantage]` configuration.

    penalty_only "drop": 0 for every row of a group whose episode returns are all equal. There the only variance is the
    invalid penalty, which the division by its own standard deviation would blow up to full scale.
    Raises ValueError for an unknown estimator.
    """
    if estimator == "grpo":
        result = grpo(rows, stat=stat, norm_std=norm_std, eps=eps)
    elif estimator == "rloo":
        result = rloo(rows, stat=stat)
    elif estimator == "gigpo":
        by_std = gigpo_norm == "mean_std"
        result = gigpo(rows, stat=stat, norm_std=by_std, omega=omega, gamma=gamma, eps=eps, similarity=similarity)
    else:
        raise ValueError(f"estimator={estimator!r} is unknown; known estimators: grpo, rloo, gigpo")
    if penalty_only == "drop":
        for members in _by(row.group for row in rows):
            if len({rows[i].episode_return for i in members}) == 1:
                for i in members:
                    result[i] = 0.0
    return result


def grpo(rows: Sequence[Row], *, stat: Stat = "steps", norm_std: bool = True, eps: float = 1e-6) -> list[float]:
    """(score - mean) / (std + eps) within the group, std unbiased; without the division if not norm_std (Dr. GRPO).

    stat "steps" takes mean and std over all rows of the group, so long trajectories weigh more; "trajectories" over
    one entry a trajectory, the score of its first row. A single entry has mean 0 and std 1, as in the reference code.
    """
    result = [0.0] * len(rows)
    for members in _by(row.group for row in rows):
        entries = _entries(rows, members, stat)
        mean, std = (0.0, 1.0) if len(entries) == 1 else (statistics.mean(entries), statistics.stdev(entries))
        for i in members:
            result[i] = (rows[i].score - mean) / (std + eps if norm_std else 1.0)
    return result


def rloo(rows: Sequence[Row], *, stat: Stat = "steps") -> list[float]:
    """(score - mean) n / (n - 1): the score less the mean of the other entries. A single entry keeps its score."""
    result = [0.0] * len(rows)
    for members in _by(row.group for row in rows):
        entries = _entries(rows, members, stat)
        n = len(entries)
        mean, scale = (0.0, 1.0) if n == 1 else (statistics.mean(entries), n / (n - 1))
        for i in members:
            result[i] = (rows[i].score - mean) * scale
    return result


def gigpo(
    rows: Sequence[Row], *, stat: Stat, norm_std: bool, omega: float, gamma: float, eps: float, similarity: float | None
) -> list[float]:
    """Episode advantage (GRPO, divided by std if norm_std) + omega * step advantage.

    The step advantage compares the discounted step returns, less the row's own penalty, of rows of one group that
    answered the same anchor observation, normalised like the episode's; a row alone with its anchor gets 0.
    Anchors match by equal text, or with `similarity` by difflib ratio >= similarity to a cluster's first anchor.
    """
    result = grpo(rows, stat=stat, norm_std=norm_std, eps=eps)
    returns = step_returns(rows, gamma=gamma)
    for members in _by(row.group for row in rows):
        for cluster in _clusters(rows, members, similarity):
            values = [returns[i] for i in cluster]
            if len(values) > 1:
                mean = statistics.mean(values)
                scale = statistics.stdev(values) + eps if norm_std else 1.0
                for i in cluster:
                    result[i] += omega * (returns[i] - mean) / scale
    return result


def step_returns(rows: Sequence[Row], *, gamma: float) -> list[float]:
    """G_t = r_t + gamma G_{t+1} within the trajectory, then less the row's own invalid penalty."""
    result = [0.0] * len(rows)
    for members in _by((row.group, row.trajectory) for row in rows):
        following = 0.0
        for i in reversed(members):
            following = rows[i].reward + gamma * following
            result[i] = following - rows[i].penalty
    return result


def gae(values: Sequence[float], score: float, *, gamma: float, lam: float) -> list[float]:
    """PPO's advantages of a row's response tokens, from the critic's value before each (GAE, arXiv 1506.02438).

    A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t. The score comes with the last token, after
    which nothing follows: the row's next turn is another row.
    """
    result: list[float] = []
    advantage, following, reward = 0.0, 0.0, score
    for value in reversed(values):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        result.append(advantage)
        following, reward = value, 0.0
    return result[::-1]


def whiten(advantages: Sequence[Sequence[float]], *, eps: float = 1e-8) -> list[list[float]]:
    """(A - mean) / sqrt(var + eps) over all tokens of all rows, var unbiased; a single token gets 0."""
    flat = [value for row in advantages for value in row]
    mean = math.fsum(flat) / max(1, len(flat))
    scale = math.sqrt(math.fsum((value - mean) ** 2 for value in flat) / max(1, len(flat) - 1) + eps)
    return [[(value - mean) / scale for value in row] for row in advantages]


def _by(keys: Iterable) -> list[list[int]]:
    """Indices with equal keys, in order of first appearance."""
    members: dict = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    return list(members.values())


def _entries(rows: Sequence[Row], members: list[int], stat: Stat) -> list[float]:
    """Scores that the group's mean and std are taken over."""
    first = {rows[i].trajectory: rows[i].score for i in reversed(members)}
    return [rows[i].score for i in members] if stat == "steps" else list(first.values())


def _clusters(rows: Sequence[Row], members: list[int], similarity: float | None) -> list[list[int]]:
    """Rows of a group by anchor; greedy in row order when anchors match by similarity."""
    if similarity is None:
        return [[members[j] for j in cluster] for cluster in _by(rows[i].anchor for i in members)]
    clusters: list[list[int]] = []
    for i in members:
        for cluster in clusters:
            if SequenceMatcher(None, rows[i].anchor, rows[cluster[0]].anchor).ratio() >= similarity:
                cluster.append(i)
                break
        else:
            clusters.append([i])
    return clusters
