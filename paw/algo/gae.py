"""PPO's advantages, one per token, computed from the values of `model.critic`."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from paw.config.traits import estimator
from paw.config.values import Share
from paw.types import Values, no_values


@estimator(needs="critic", anchors="nothing")
def gae(
    values: Sequence[float], score: float, *, gamma: Share = 1.0, lam: Share = 1.0
) -> list[float]:
    """Return the advantages of a sample's response tokens, given the critic's value before each.

    GAE, arXiv 1506.02438:
    A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t. The score is the reward
    of the last token. Nothing follows that token: the next turn is another sample.

    Args:
        gamma: discount from token to token
        lam: GAE's lambda
    """
    advantages: list[float] = []
    advantage = 0.0
    next_value = 0.0
    reward = score
    for value in reversed(values):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        advantages.append(advantage)
        next_value = value
        reward = 0.0
    advantages.reverse()
    return advantages


def whiten(
    advantages: Sequence[Values],
    *,
    eps: float = 1e-8,
    gather: Callable[[float], list[float]] = lambda own: [own],
) -> list[Values]:
    """Return (A - mean) / sqrt(var + eps) over all tokens of all samples, var unbiased.

    Each array has the advantages of a sample's tokens. `gather` returns a number of each rank, if
    ranks have samples of their own. A single token gets 0.
    """
    all_advantages = np.concatenate([no_values(), *advantages])
    token_count = math.fsum(gather(len(all_advantages)))
    mean = math.fsum(gather(math.fsum(all_advantages.tolist()))) / max(1, token_count)
    squares = (all_advantages - mean) ** 2
    variance = math.fsum(gather(math.fsum(squares.tolist()))) / max(1, token_count - 1)
    scale = math.sqrt(variance + eps)
    return [(sample_advantages - mean) / scale for sample_advantages in advantages]
