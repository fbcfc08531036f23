"""AdamW and the learning-rate schedule of the configuration."""

import math
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paw.config import OptimConfig
from paw.errors import UserError, needed


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of `optim.name` over what is trained. UserError where flash-adamw cannot run."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if config.name == "adamw":
        return torch.optim.AdamW(trained, fused=True, **options)  # foreach keeps 4 more bytes a parameter meanwhile
    if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
        raise UserError("optim.name = 'flash-adamw': it needs a GPU; or use --optim.name adamw")
    needed("flashoptim", "optim.name = 'flash-adamw'", "flash", instead="--optim.name adamw")
    from paw.model.flash import FlashAdamW

    return FlashAdamW(trained, master_bits=config.master_bits, offload=config.offload, **options)


def learning_rate(config: OptimConfig, *, update: int, updates: int) -> float:
    """lr of update 0, 1, ...: linear warm-up over `warmup_updates`, then constant or cosine down to final_lr * lr."""
    factor = min(1.0, (update + 1) / config.warmup_updates) if config.warmup_updates else 1.0
    if config.schedule == "cosine":
        progress = (update + 1) / updates
        factor *= config.final_lr + (1.0 - config.final_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * factor


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """`lr`, times a group's own "scale"."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)
