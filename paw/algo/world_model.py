"""Which samples the world model learns from, and how much: PaW Eqs. (8) to (11).

The samples whose action the policy was least sure of (top share alpha by action entropy) are
selected over the whole update; a group's term weighs more the less the group succeeds (lambda_g).
The normalisation by the observation's length happens at token level, in the loss.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paw.types import Sample


@dataclass(frozen=True)
class Selection:
    """Example: two samples with a target in group 0, mean return 2.5 of 10, both selected, one
    group: weights [0.375, 0.375], selected [True, True], lambdas [0.75].
    """

    weights: list[float]
    """[N] lambda_g / (n_groups * |S_g|) on selected samples, 0 elsewhere."""
    selected: list[bool]
    """[N]"""
    lambdas: list[float]
    """lambda_g of each group that has samples, in the order of their first sample."""


def select(
    samples: Sequence[Sample],
    *,
    alpha: float,
    weight: Literal["adaptive"] | float,
    reward_max: float,
    n_groups: int,
    dedup: bool = False,
) -> Selection:
    """Select the top ceil(alpha n) samples by `sample.entropy` and weigh them.

    Only samples with a target (non-empty observation_ids) take part: n counts them alone, since
    another has nothing to learn and would take a place. Ties go to the lower index. S_g are the
    selected samples of group g; a group without any adds nothing, but still counts in n_groups.
    dedup (beyond the paper): of samples with the same prompt, response and targets only the first
    takes part. lambda_g = 1 - (mean raw return over the group's trajectories) / reward_max, clamped
    to [0, 1], or the constant `weight`. Groups are told apart by sample.group; each trajectory
    counts once.

    Raises ValueError for alpha outside [0, 1], reward_max <= 0 with the adaptive weight, fewer
    n_groups than groups, or entropy that is not finite.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    if weight == "adaptive" and not reward_max > 0:
        raise ValueError(f"reward_max must be positive, got {reward_max}")
    returns: dict[int, dict[int, float]] = {}
    for sample in samples:
        returns.setdefault(sample.group, {})[sample.trajectory] = sample.episode_return
    if weight == "adaptive":  # PaW Eq. (10)
        lambdas = {
            g: min(1.0, max(0.0, 1.0 - sum(of.values()) / len(of) / reward_max))
            for g, of in returns.items()
        }
    else:
        lambdas = dict.fromkeys(returns, float(weight))
    if n_groups < len(lambdas):
        raise ValueError(
            f"n_groups={n_groups} is less than the {len(lambdas)} groups of the samples"
        )

    candidates = [i for i, sample in enumerate(samples) if sample.observation_ids]
    if dedup:
        kinds = {_kind(samples[i]): i for i in reversed(candidates)}
        candidates = sorted(kinds.values())
    if not all(math.isfinite(samples[i].entropy) for i in candidates):
        raise ValueError("sample.entropy must be finite on every sample with a target")
    count = math.ceil(alpha * len(candidates) - 1e-9)  # of 0.1 * 30 = 3.0000000000000004 3
    chosen = {*sorted(candidates, key=lambda i: -samples[i].entropy)[:count]}
    selected = [i in chosen for i in range(len(samples))]

    size = Counter(sample.group for sample, on in zip(samples, selected, strict=True) if on)
    weights = [
        lambdas[sample.group] / (n_groups * size[sample.group]) if on else 0.0
        for sample, on in zip(samples, selected, strict=True)
    ]
    return Selection(weights, selected, list(lambdas.values()))


def _kind(sample: Sample) -> tuple[tuple[int, ...], ...]:
    return tuple(sample.prompt_ids), tuple(sample.response_ids), tuple(sample.observation_ids)
