"""The choice of activations to keep for backward with `model.checkpointing = "selective"`."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def selective_contexts() -> tuple[Any, Any]:
    """Return contexts that keep the outputs of attention and of every second matrix product.

    The rest is recomputed, as in torchtitan.
    """
    products = {"forward": 0, "recompute": 0}
    """Number of matrix products so far in each pass."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            phase = "recompute" if context.is_recompute else "forward"
            products[phase] += 1
            is_kept = products[phase] % 2 == 1
        else:
            is_kept = "attention" in str(op) or "attn" in str(op)
        if is_kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
