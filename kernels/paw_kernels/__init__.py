"""Fused language-model head: log-probabilities, entropies and any loss, without full logits.

It works without the trainer and needs only torch.
"""

from paw_kernels._backend import BACKENDS, best_backend, fault_of_backend, why_not_backend
from paw_kernels.token_loss import Loss, TokenLoss, token_loss
from paw_kernels.token_stats import TokenStats, token_stats

__all__ = [
    "BACKENDS",
    "Loss",
    "TokenLoss",
    "TokenStats",
    "best_backend",
    "fault_of_backend",
    "token_loss",
    "token_stats",
    "why_not_backend",
]
