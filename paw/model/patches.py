"""Optional faster layers: Liger's kernels (`model.liger`) and torch.compile (`model.compile`).

They compute the same function.
"""

import logging
import os
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from paw.errors import UserError, needed
from paw.model.attention import ATTENTION, decoder_layers, packed_attention

MOST_VERSIONS = 64
"""Maximum number of compiled versions of a layer's code. There is one for each kind of layer, with
and without gradients and adapters, in the backward pass of a checkpointed layer, ... Beyond torch's
own limit of 8, layers would silently be eager."""


def import_liger(device: torch.device) -> Any:
    """Import Liger's module of patches. Raises UserError if it is not installed or cannot run."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f"model.liger needs a GPU, but this run is on '{device.type}'; use --model.liger false"
        )
    return needed(
        "liger_kernel.transformers.monkey_patch",
        "model.liger",
        "liger",
        instead="--model.liger false",
    )


def apply_liger(lm: PreTrainedModel) -> None:
    """Replace `lm`'s norms, rotary embedding and gated MLP with Liger's. The head stays ours.

    The rotary embedding is replaced for every model of this type in the process. The rest is
    replaced for this model and for those made later. Raises UserError if Liger has no kernels for
    the model.
    """
    # Liger warns about back ends that are not used.
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    liger = import_liger(lm.device)
    model_type = lm.config.model_type
    if model_type not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(
            f"model.liger: Liger has no kernels for '{model_type}' models; use --model.liger false"
        )
    liger._apply_liger_kernel_to_instance(lm, fused_linear_cross_entropy=False, cross_entropy=False)


def compile_layers(lm: PreTrainedModel) -> None:
    """Compile every decoder layer with torch.compile, for any number of tokens, before sharding.

    Only `forward` is compiled. Hooks (FSDP's) and checkpointing stay outside it. Attention over
    packed rows is not in the graph, and nothing in the graph depends on the rows. Sampling does not
    pack rows, so it runs the layers uncompiled.
    """
    torch._dynamo.config.recompile_limit = MOST_VERSIONS
    AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))
    for layer in decoder_layers(lm):
        layer.forward = _compiled(layer.forward)


def _compiled(eager: Any) -> Any:
    compiled = torch.compile(eager, dynamic=True)

    def forward(*args: Any, **options: Any) -> Any:
        if "packed" in options:
            return compiled(*args, **options)
        return eager(*args, **options)

    return forward
