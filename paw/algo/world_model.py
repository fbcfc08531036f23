"""Selecting and weighting the samples that the world model learns from: PaW Eqs. (8) to (11).

The samples of the whole update whose actions the policy was least sure of are selected: the top
share alpha by action entropy. The less a group succeeds, the higher the weight of its term
(lambda_g). The loss normalises by the observation's length, at token level.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paw.algo.shared_samples import column
from paw.types import Sample


@dataclass(frozen=True)
class Selection:
    """Which samples were selected, and their weights.

    Example: two samples with a target in group 0, mean return 2.5 of 10, both selected, one group:
    weights [0.375, 0.375], selected [True, True], lambdas [0.75].
    """

    weights: list[float]
    """[N] lambda_g / (n_groups * |S_g|) on selected samples, 0 elsewhere."""
    selected: list[bool]
    """[N] Whether the world model learns from the sample."""
    lambdas: list[float]
    """lambda_g of each group that has samples, in the order of their first sample."""


def select(
    samples: Sequence[Sample],
    *,
    alpha: float,
    weight: Literal["adaptive"] | float,
    reward_max: float | Sequence[float],
    n_groups: int,
    distinct: Sequence[Hashable] | None = None,
) -> Selection:
    """Select the top ceil(alpha n) samples by `sample.entropy` and weight them.

    Only samples with a target (non-empty observation_ids) are candidates, and n counts only them,
    since the world model can learn nothing from others. Ties go to the lower index. S_g is the set
    of selected samples of group g. A group with none adds nothing but still counts in n_groups.
    With `distinct` (not in the paper), a key of each sample, only the first of the samples with the
    same key is a candidate (`algo.rows.gather_digests`). lambda_g = 1 - (mean raw return over the
    group's trajectories) / reward_max, clamped to [0, 1], or the constant `weight`. `reward_max` is
    one number, or one of each group if they are of different environments.

    Raises ValueError for alpha outside [0, 1], reward_max <= 0 with the adaptive weight, fewer
    n_groups than groups, or entropy that is not finite.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    lowest_maximum = reward_max if isinstance(reward_max, int | float) else min(reward_max)
    if weight == "adaptive" and not lowest_maximum > 0:
        raise ValueError(f"reward_max must be positive, got {lowest_maximum}")
    lambdas = _lambdas(samples, weight, reward_max)
    if n_groups < len(lambdas):
        raise ValueError(
            f"n_groups={n_groups} is less than the {len(lambdas)} groups of the samples"
        )

    candidates = _candidates(samples, distinct)
    entropy = column(samples, "entropy")[candidates]
    if not np.isfinite(entropy).all():
        raise ValueError("sample.entropy must be finite on every sample with a target")

    # Without the 1e-9, 0.1 * 30 = 3.0000000000000004 would be rounded up to 4.
    selected_count = math.ceil(alpha * len(candidates) - 1e-9)
    chosen = candidates[np.argsort(-entropy, kind="stable")[:selected_count]]

    group = column(samples, "group")[chosen].astype(np.int64)
    group_sizes = np.bincount(group)  # |S_g|
    lambda_of_group = np.array([lambdas.get(i, 0.0) for i in range(len(group_sizes))])
    selected = np.zeros(len(samples), np.bool_)
    selected[chosen] = True
    weights = np.zeros(len(samples))
    weights[chosen] = lambda_of_group[group] / (n_groups * group_sizes[group])
    return Selection(weights.tolist(), selected.tolist(), list(lambdas.values()))


def _candidates(samples: Sequence[Sample], distinct: Sequence[Hashable] | None) -> np.ndarray:
    """Return the indices [n] of samples with a target; with `distinct`, the first of each key."""
    with_target = np.flatnonzero(column(samples, "observation_length"))
    if distinct is None:
        return with_target
    first_of_key: dict[Hashable, int] = {}
    for i in with_target.tolist():
        first_of_key.setdefault(distinct[i], i)
    return np.array(list(first_of_key.values()), np.int64)


def _lambdas(
    samples: Sequence[Sample],
    weight: Literal["adaptive"] | float,
    reward_max: float | Sequence[float],
) -> dict[int, float]:
    """Return lambda_g by group (PaW Eq. (10)). Each trajectory counts once."""
    returns: dict[int, dict[int, float]] = {}  # by group and trajectory
    if len(samples):
        group = column(samples, "group")
        trajectory = column(samples, "trajectory")
        is_new = np.append(True, (group[1:] != group[:-1]) | (trajectory[1:] != trajectory[:-1]))
        starts = np.flatnonzero(is_new)
        rows = zip(
            group[starts].tolist(),
            trajectory[starts].tolist(),
            column(samples, "episode_return")[starts].tolist(),
            strict=True,
        )
        for group_number, trajectory_number, episode_return in rows:
            returns.setdefault(group_number, {})[trajectory_number] = episode_return
    if weight != "adaptive":
        return dict.fromkeys(returns, float(weight))

    lambdas: dict[int, float] = {}
    for group, group_returns in returns.items():
        mean = sum(group_returns.values()) / len(group_returns)
        maximum = reward_max if isinstance(reward_max, int | float) else reward_max[group]
        lambdas[group] = min(1.0, max(0.0, 1.0 - mean / maximum))
    return lambdas
