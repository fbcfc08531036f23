"""Fused language-model head: per-row log-probabilities, entropies and policy / world-model losses without full logits.

Usable without the trainer: needs torch and nothing else.
"""

from paw_kernels._backend import BACKENDS, best_backend, why_not_backend
from paw_kernels.coefficients import ACTION, OBSERVATION, SKIP, LossRows
from paw_kernels.paw_loss import PawLoss, paw_loss
from paw_kernels.segments import segment_mean, segment_sum, top_alpha
from paw_kernels.token_stats import TokenStats, token_stats

__all__ = [
    "ACTION",
    "BACKENDS",
    "OBSERVATION",
    "SKIP",
    "LossRows",
    "PawLoss",
    "TokenStats",
    "best_backend",
    "paw_loss",
    "segment_mean",
    "segment_sum",
    "token_stats",
    "top_alpha",
    "why_not_backend",
]
