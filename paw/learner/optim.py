"""AdamW and the learning-rate schedule of the configuration."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from paw.config import OptimConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, foreach=True
    )


def learning_rate(config: OptimConfig, *, update: int, updates: int) -> float:
    """lr of update 0, 1, ...: linear warm-up over `warmup_updates`, then constant or cosine down to final_lr * lr."""
    factor = min(1.0, (update + 1) / config.warmup_updates) if config.warmup_updates else 1.0
    if config.schedule == "cosine":
        progress = (update + 1) / updates
        factor *= config.final_lr + (1.0 - config.final_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * factor


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
