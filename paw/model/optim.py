"""AdamW and the learning-rate schedule of the configuration."""

import math
import os
from collections.abc import Iterable

import torch
from torch import nn

from paw.config.sections import OptimConfig
from paw.errors import UserError, needed


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimConfig
) -> torch.optim.Optimizer:
    """Make the optimizer `optim.name` for the parameters that require a gradient.

    Raises UserError if it is flash-adamw and cannot run here.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if config.name == "adamw":
        return torch.optim.AdamW(
            trained,
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,  # foreach needs 4 more bytes per parameter during the step
        )

    if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
        raise UserError("optim.name = 'flash-adamw' needs a GPU; use --optim.name adamw")
    needed("flashoptim", "optim.name = 'flash-adamw'", "flash", instead="--optim.name adamw")
    from paw.model.flash import FlashAdamW

    return FlashAdamW(
        trained,
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        master_bits=config.master_bits,
        offload=config.offload,
    )


def learning_rate(config: OptimConfig, *, update: int, updates: int) -> float:
    """Return the learning rate of `update`, which counts from 0 to `updates` - 1.

    It warms up linearly over `warmup_updates`. Then it stays constant or follows a cosine down to
    final_lr * lr.
    """
    factor = 1.0
    if config.warmup_updates:
        factor = min(1.0, (update + 1) / config.warmup_updates)
    if config.schedule == "cosine":
        progress = (update + 1) / updates
        factor *= config.final_lr + (1.0 - config.final_lr) * 0.5 * (
            1.0 + math.cos(math.pi * progress)
        )
    return config.lr * factor


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set each parameter group's learning rate: `lr` times the group's "scale", if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)
