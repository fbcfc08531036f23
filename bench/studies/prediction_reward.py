"""Prediction as a reward in place of a loss: what an episode predicted well adds to its score (arXiv 2607.21273).

    paw experiment compare miniature --variants grpo --seeds 10 --variant "predict: wm.enabled=true
        wm.weight=0 advantage.type=bench/studies/prediction_reward.py:grpo
        run.callbacks=bench/studies/prediction_reward.py:Prediction"

The score of an episode gets `bonus` times the mean probability, under the policy that played it, of
the tokens of its observations; GRPO then divides by the standard deviation of the group as always.
With `advantage.penalty_only = "keep"` a group that never wins learns from prediction alone, at full
size.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from paw.algo import advantages
from paw.algo.loss import log_probs
from paw.types import Sample

_runs: list[Any] = []


class Prediction:
    """Remembers the run: an advantage estimator sees samples alone."""

    def on_start(self, run: Any) -> None:
        _runs[:] = [run]


def grpo(
    samples: Sequence[Sample],
    *,
    bonus: float = 0.5,
    stat: advantages.Stat = "trajectories",
    eps: float = 0.05,
) -> list[float]:
    """GRPO over scores that hold prediction too.

    bonus: Weight of the mean probability of an episode's observation tokens.
    stat: Mean and standard deviation over all turns of the group, or over one score a trajectory.
    eps: Added to the standard deviation.
    """
    (run,) = _runs
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.trajectory, []).append(sample)
    bonuses = _predicted(run, samples)
    scored = [
        replace(sample, score=sample.score + bonus * bonuses[sample.trajectory])
        for sample in samples
    ]
    return advantages.grpo(scored, stat=stat, eps=eps)


def _predicted(run: Any, samples: Sequence[Sample]) -> dict[int, float]:
    """Mean probability of the observation tokens of each trajectory, the target of the last turn left out."""
    asked = [
        replace(sample, prompt_ids=sample.prompt_ids + sample.response_ids + sample.separator_ids,
                response_ids=sample.observation_ids, continues=False)
        for sample in samples if sample.observation_ids
    ]  # fmt: skip
    found: dict[int, list[float]] = {sample.trajectory: [] for sample in samples}
    scored = log_probs(run.policy, asked, run.packing, temperature=1.0)
    for i, (logp, _) in scored.items():
        found[asked[i].trajectory] += [math.exp(value) for value in logp]
    return {trajectory: fmean(values) if values else 0.0 for trajectory, values in found.items()}
