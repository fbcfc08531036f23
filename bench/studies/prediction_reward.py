"""Prediction as a reward instead of a loss: an episode scores higher if it was predicted well (arXiv 2607.21273).

    paw experiment compare miniature --variants grpo --seeds 10 --variant "predict: wm.enabled=true
        wm.weight=0 advantage.type=bench/studies/prediction_reward.py:grpo
        run.callbacks=bench/studies/prediction_reward.py:Prediction"

`bonus` times the mean probability of its observation tokens, under the policy that played it, is
added to the score of an episode. GRPO then divides by the standard deviation of the group as usual.
With `advantage.penalty_only = "keep"`, a group that never wins learns from prediction alone, with
advantages of full size.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from paw.algo import advantages
from paw.algo.loss import log_probs
from paw.types import Sample

_runs: list[Any] = []


class Prediction:
    """Keeps the run for `grpo`, because an advantage estimator only gets samples."""

    def on_start(self, run: Any) -> None:
        _runs[:] = [run]


def grpo(
    samples: Sequence[Sample],
    *,
    bonus: float = 0.5,
    stat: advantages.Stat = "trajectories",
    eps: float = 0.05,
) -> list[float]:
    """GRPO over scores that include prediction.

    bonus: Weight of the mean probability of an episode's observation tokens.
    stat: Mean and standard deviation over all turns of the group, or over one score a trajectory.
    eps: Added to the standard deviation.
    """
    (run,) = _runs
    predicted = mean_probabilities(run, samples)
    scored = []
    for sample in samples:
        score = sample.score + bonus * predicted[sample.trajectory]
        scored.append(replace(sample, score=score))
    return advantages.grpo(scored, stat=stat, eps=eps)


def mean_probabilities(run: Any, samples: Sequence[Sample]) -> dict[int, float]:
    """Trajectory -> mean probability of its observation tokens. The last turn has none."""
    predictions = [as_response(sample) for sample in samples if len(sample.observation_ids)]
    rated = log_probs(run.policy, predictions, run.packing, temperature=1.0)

    probabilities: dict[int, list[float]] = {sample.trajectory: [] for sample in samples}
    for index, (logp, _) in rated.items():
        trajectory = predictions[index].trajectory
        probabilities[trajectory] += [math.exp(token_logp) for token_logp in logp.tolist()]
    return {
        trajectory: fmean(values) if values else 0.0 for trajectory, values in probabilities.items()
    }


def as_response(sample: Sample) -> Sample:
    """The sample with its observation as response, so that `log_probs` rates the observation."""
    return replace(
        sample,
        prompt_ids=np.concatenate([sample.prompt_ids, sample.response_ids, sample.separator_ids]),
        response_ids=sample.observation_ids,
        continues=False,
    )
