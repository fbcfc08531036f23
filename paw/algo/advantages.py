"""Group-relative advantages: one scalar a sample, broadcast to its response tokens.

GRPO (arXiv 2402.03300) and its Dr. GRPO form, RLOO (arXiv 2402.14740), GiGPO (arXiv 2505.10978),
with the semantics of GiGPO's public code (verl-agent, commit 796ed31), which the paper's baselines
ran. A sample's score is its episode return less its own invalid penalty. Samples come in group,
trajectory, step order, and answers are in the same order. PPO's, one a token, are in `algo.gae`.

Worked example. One group: trajectory A wins 10 in two steps; B fails in three, its second step
invalid (-0.1). Scores are [10, 10 | 0, -0.1, 0]; GRPO over steps gives [1.095, 1.095 | -0.724,
-0.742, -0.724].
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal

from paw.errors import UserError, shown
from paw.types import Sample
from paw.values import NonNegative, Share

Stat = Literal["steps", "trajectories"]


def checked(found: Any, samples: Sequence[Sample], name: str) -> list[float]:
    """What the estimator called `name` returned, if it is a finite number for each sample; else UserError."""
    try:
        advantages = [float(value) for value in found]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UserError(
            f"advantage.type = '{name}' must return a number for each sample, not {shown(found)}"
        ) from None
    if len(advantages) != len(samples):
        raise UserError(
            f"advantage.type = '{name}' returned {len(advantages)} numbers for {len(samples)} samples"
        )
    if odd := [value for value in advantages if not math.isfinite(value)]:
        raise UserError(
            f"advantage.type = '{name}' returned {odd[0]} for {len(odd)} of {len(samples)} samples"
        )
    return advantages


def drop_penalty_only(samples: Sequence[Sample], advantages: Sequence[float]) -> list[float]:
    """The advantages, 0 for every sample of a group whose episode returns are all equal.

    There the only variance is the invalid penalty, which the division by its own standard deviation
    would blow up.
    """
    result = list(advantages)
    for members in _by(sample.group for sample in samples):
        if len({samples[i].episode_return for i in members}) == 1:
            for i in members:
                result[i] = 0.0
    return result


def grpo(
    samples: Sequence[Sample],
    *,
    stat: Stat = "steps",
    norm_std: bool = True,
    eps: NonNegative = 1e-6,
) -> list[float]:
    """(score - mean) / (std + eps) within the group, std unbiased; without the division if not norm_std (Dr. GRPO).

    stat "steps" takes mean and std over all samples of the group, so long trajectories weigh more;
    "trajectories" over one entry a trajectory, the score of its first sample. A single entry has
    mean 0, std 1, as in the reference code.

    Args:
        stat: mean and standard deviation over all turns of the group, or over one score a
            trajectory
        norm_std: divide by the standard deviation; false is Dr. GRPO
        eps: added to the standard deviation
    """
    result = [0.0] * len(samples)
    for members in _by(sample.group for sample in samples):
        entries = _entries(samples, members, stat)
        mean, std = (
            (0.0, 1.0)
            if len(entries) == 1
            else (statistics.mean(entries), statistics.stdev(entries))
        )
        for i in members:
            result[i] = (samples[i].score - mean) / (std + eps if norm_std else 1.0)
    return result


def rloo(samples: Sequence[Sample], *, stat: Stat = "steps") -> list[float]:
    """(score - mean) n / (n - 1): the score less the mean of the other entries. A single entry keeps its score.

    Args:
        stat: mean over all turns of the group, or over one score a trajectory
    """
    result = [0.0] * len(samples)
    for members in _by(sample.group for sample in samples):
        entries = _entries(samples, members, stat)
        n = len(entries)
        mean, scale = (0.0, 1.0) if n == 1 else (statistics.mean(entries), n / (n - 1))
        for i in members:
            result[i] = (samples[i].score - mean) * scale
    return result


def gigpo(
    samples: Sequence[Sample],
    *,
    stat: Stat = "steps",
    norm_std: bool = True,
    eps: NonNegative = 1e-6,
    omega: NonNegative = 1.0,
    gamma: Share = 0.95,
    similarity: Share | None = None,
) -> list[float]:
    """Episode advantage (GRPO, divided by std if norm_std) + omega * step advantage.

    The step advantage compares the discounted step returns, less the sample's own penalty, of
    samples of one group that answered the same anchor observation, normalised like the episode's; a
    sample alone with its anchor gets 0. Anchors match by equal text, or with `similarity` by
    difflib ratio >= similarity to a cluster's first anchor.

    Args:
        stat: mean and standard deviation over all turns of the group, or over one score a
            trajectory
        norm_std: divide both parts by their standard deviation
        eps: added to the standard deviation
        omega: weight of the step advantage
        gamma: discount of the step returns
        similarity: anchors match at or above this difflib ratio; unset, only equal texts do
    """
    result = grpo(samples, stat=stat, norm_std=norm_std, eps=eps)
    returns = step_returns(samples, gamma=gamma)
    for members in _by(sample.group for sample in samples):
        for cluster in _clusters(samples, members, similarity):
            values = [returns[i] for i in cluster]
            if len(values) > 1:
                mean = statistics.mean(values)
                scale = statistics.stdev(values) + eps if norm_std else 1.0
                for i in cluster:
                    result[i] += omega * (returns[i] - mean) / scale
    return result


def step_returns(samples: Sequence[Sample], *, gamma: float) -> list[float]:
    """G_t = r_t + gamma G_{t+1} within the trajectory, then less the sample's own invalid penalty."""
    result = [0.0] * len(samples)
    for members in _by((sample.group, sample.trajectory) for sample in samples):
        following = 0.0
        for i in reversed(members):
            following = samples[i].reward + gamma * following
            result[i] = following - samples[i].penalty
    return result


def _by(keys: Iterable) -> list[list[int]]:
    """Indices with equal keys, in order of first appearance."""
    members: dict = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    return list(members.values())


def _entries(samples: Sequence[Sample], members: list[int], stat: Stat) -> list[float]:
    """Scores that the group's mean and std are taken over."""
    first = {samples[i].trajectory: samples[i].score for i in reversed(members)}
    return [samples[i].score for i in members] if stat == "steps" else list(first.values())


def _clusters(
    samples: Sequence[Sample], members: list[int], similarity: float | None
) -> list[list[int]]:
    """Samples of a group by anchor; greedy in sample order when anchors match by similarity."""
    if similarity is None:
        return [
            [members[j] for j in cluster] for cluster in _by(samples[i].anchor for i in members)
        ]
    clusters: list[list[int]] = []
    for i in members:
        for cluster in clusters:
            if (
                SequenceMatcher(None, samples[i].anchor, samples[cluster[0]].anchor).ratio()
                >= similarity
            ):
                cluster.append(i)
                break
        else:
            clusters.append([i])
    return clusters
