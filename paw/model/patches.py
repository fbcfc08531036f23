"""Faster layers, on request: Liger's kernels (`model.liger`) and torch.compile (`model.compile`).

Same mathematics.
"""

import logging
import os
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from paw.errors import UserError, needed
from paw.model.attention import ATTENTION, decoder_layers, packed_attention


def import_liger(device: torch.device) -> Any:
    """Liger's module of patches; UserError where it is missing or cannot run."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f"model.liger needs a GPU, this run is on '{device.type}'; use --model.liger false"
        )
    instead = "--model.liger false"
    return needed("liger_kernel.transformers.monkey_patch", "model.liger", "liger", instead=instead)


def apply_liger(lm: PreTrainedModel) -> None:
    """Liger's norms, rotary embedding and gated MLP in place of `lm`'s; UserError for a model it does not know.

    The rotary embedding is replaced for every model of this kind in the process, the rest for those
    made from now on. The head stays ours.
    """
    logging.getLogger("liger_kernel").setLevel(
        logging.ERROR
    )  # it warns of back ends that nobody asked for
    liger, kind = import_liger(lm.device), lm.config.model_type
    if kind not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(
            f"model.liger: Liger has no kernels for '{kind}' models; use --model.liger false"
        )
    liger._apply_liger_kernel_to_instance(lm, fused_linear_cross_entropy=False, cross_entropy=False)


def compile_layers(lm: PreTrainedModel) -> None:
    """torch.compile every decoder layer, for any number of tokens; before sharding.

    Only `forward` is compiled: hooks (FSDP's) and checkpointing stay around it, and attention over
    packed rows, with all that depends on the rows, is left out of the graph. Sampling, which packs
    no rows, does without.
    """
    AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))
    for layer in decoder_layers(lm):
        layer.forward = _compiled(layer.forward)


def _compiled(eager: Any) -> Any:
    fast = torch.compile(eager, dynamic=True)

    def forward(*args: Any, **options: Any) -> Any:
        return (fast if "packed" in options else eager)(*args, **options)

    return forward
