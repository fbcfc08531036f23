"""Group-relative advantages: one scalar per sample, broadcast to its response tokens.

GRPO (arXiv 2402.03300) and its Dr. GRPO form, RLOO (arXiv 2402.14740), GiGPO (arXiv 2505.10978).
They follow GiGPO's public code (verl-agent, commit 796ed31), which the paper's baselines used. A
sample's score is its episode return minus its own invalid penalty. Samples are ordered by group,
trajectory and step, and so are the advantages returned. PPO's advantages, one per token, are in
`algo.gae`.

Worked example. One group: trajectory A wins 10 in two steps. B fails in three steps, and its second
step is invalid (-0.1). Scores are [10, 10 | 0, -0.1, 0]; GRPO over steps gives [1.095, 1.095 |
-0.724, -0.742, -0.724].
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal

from paw.config.traits import estimator
from paw.config.values import NonNegative, Share
from paw.errors import UserError, short_repr
from paw.types import Sample

Stat = Literal["steps", "trajectories"]


def check_advantages(
    returned: Any, name: str, *, count: int, unit: Literal["sample", "token"] = "sample"
) -> list[float]:
    """Return the advantages that the estimator `name` computed.

    Raises UserError unless there is one finite number for each of `count` samples or tokens.
    """
    try:
        advantages = [float(value) for value in returned]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UserError(
            f"advantage.type = '{name}' must return a number for each {unit}, "
            f"not {short_repr(returned)}"
        ) from None
    if len(advantages) != count:
        raise UserError(
            f"advantage.type = '{name}' returned {len(advantages)} numbers for {count} {unit}s"
        )
    not_finite = [value for value in advantages if not math.isfinite(value)]
    if not_finite:
        raise UserError(
            f"advantage.type = '{name}' returned {not_finite[0]} "
            f"for {len(not_finite)} of {count} {unit}s"
        )
    return advantages


def drop_penalty_only(samples: Sequence[Sample], advantages: Sequence[float]) -> list[float]:
    """Return the advantages, set to 0 in every group whose episode returns are all equal.

    In such a group only the invalid penalties vary, and dividing by their standard deviation would
    magnify them.
    """
    result = list(advantages)
    for members in _indices_by(sample.group for sample in samples):
        if len({samples[i].episode_return for i in members}) == 1:
            for i in members:
                result[i] = 0.0
    return result


@estimator(by_group=True, anchors="nothing")
def grpo(
    samples: Sequence[Sample],
    *,
    stat: Stat = "steps",
    norm_std: bool = True,
    eps: NonNegative = 1e-6,
) -> list[float]:
    """Return (score - mean) / (std + eps) within the group, std unbiased.

    Without norm_std there is no division (Dr. GRPO).

    stat "steps" takes mean and std over all samples of the group, so long trajectories weigh more;
    "trajectories" takes them over one entry per trajectory, the score of its first sample. A single
    entry has mean 0 and std 1, as in the reference code.

    Args:
        stat: mean and standard deviation over all turns of the group, or over one score per
            trajectory
        norm_std: divide by the standard deviation; false is Dr. GRPO
        eps: added to the standard deviation
    """
    result = [0.0] * len(samples)
    for members in _indices_by(sample.group for sample in samples):
        entries = _entries(samples, members, stat)
        mean = 0.0
        std = 1.0
        if len(entries) > 1:
            mean = statistics.mean(entries)
            std = statistics.stdev(entries)
        scale = std + eps if norm_std else 1.0
        for i in members:
            result[i] = (samples[i].score - mean) / scale
    return result


@estimator(by_group=True, anchors="nothing")
def rloo(samples: Sequence[Sample], *, stat: Stat = "steps") -> list[float]:
    """Return (score - mean) n / (n - 1), which is the score minus the mean of the other entries.

    A single entry keeps its score.

    Args:
        stat: mean over all turns of the group, or over one score per trajectory
    """
    result = [0.0] * len(samples)
    for members in _indices_by(sample.group for sample in samples):
        entries = _entries(samples, members, stat)
        episodes = len(entries)
        mean = 0.0
        scale = 1.0
        if episodes > 1:
            mean = statistics.mean(entries)
            scale = episodes / (episodes - 1)
        for i in members:
            result[i] = (samples[i].score - mean) * scale
    return result


@estimator(by_group=True, anchors="equality")
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
    """Return the episode advantage (GRPO, divided by its std if norm_std) + omega * step advantage.

    The step advantage compares the samples of one group that answered the same anchor observation.
    It takes their discounted step returns minus their own penalties, and normalises them like the
    episode's. It is 0 for a sample that shares its anchor with no other. Anchors match if their
    texts are equal. With `similarity`, they match if the difflib ratio to a cluster's first anchor
    is at least that.

    Args:
        stat: mean and standard deviation over all turns of the group, or over one score per
            trajectory
        norm_std: divide both parts by their standard deviation
        eps: added to the standard deviation
        omega: weight of the step advantage
        gamma: discount of the step returns
        similarity: anchors match at or above this difflib ratio; unset, only equal texts do
    """
    result = grpo(samples, stat=stat, norm_std=norm_std, eps=eps)
    returns = step_returns(samples, gamma=gamma)
    for members in _indices_by(sample.group for sample in samples):
        for cluster in _clusters(samples, members, similarity):
            values = [returns[i] for i in cluster]
            if len(values) > 1:
                mean = statistics.mean(values)
                scale = statistics.stdev(values) + eps if norm_std else 1.0
                for i in cluster:
                    result[i] += omega * (returns[i] - mean) / scale
    return result


def step_returns(samples: Sequence[Sample], *, gamma: float) -> list[float]:
    """Return G_t = r_t + gamma G_{t+1} in the trajectory, minus the sample's own invalid penalty.

    The penalty does not enter the returns of earlier steps.
    """
    result = [0.0] * len(samples)
    for members in _indices_by((sample.group, sample.trajectory) for sample in samples):
        following = 0.0
        for i in reversed(members):
            following = samples[i].reward + gamma * following
            result[i] = following - samples[i].penalty
    return result


def _indices_by(keys: Iterable[Hashable]) -> list[list[int]]:
    """Group the indices of equal keys: one list per key, in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    return list(members.values())


def _entries(samples: Sequence[Sample], members: list[int], stat: Stat) -> list[float]:
    """Return the scores that a group's mean and std are taken over, see `grpo`."""
    if stat == "steps":
        return [samples[i].score for i in members]
    first_scores = {samples[i].trajectory: samples[i].score for i in reversed(members)}
    return list(first_scores.values())


def _clusters(
    samples: Sequence[Sample], members: list[int], similarity: float | None
) -> list[list[int]]:
    """Cluster a group's samples by anchor, greedily in sample order if matched by similarity."""
    clusters: list[list[int]] = []
    if similarity is None:
        for positions in _indices_by(samples[i].anchor for i in members):
            clusters.append([members[position] for position in positions])
        return clusters

    for i in members:
        for cluster in clusters:
            matcher = SequenceMatcher(None, samples[i].anchor, samples[cluster[0]].anchor)
            if matcher.ratio() >= similarity:
                cluster.append(i)
                break
        else:
            clusters.append([i])
    return clusters
