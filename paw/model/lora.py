"""LoRA (Hu et al., arXiv 2106.09685): low-rank adapters beside frozen weights, made by peft.

    W' = W + alpha / rank * B A    W [out, in]; A [rank, in] starts random, B [out, rank] zero

peft replaces layers in place: `q_proj.weight` becomes `q_proj.base_layer.weight`, beside
`q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. vLLM gets only A and B (or W').
The export gets W' under the old names, and so does the transformers engine with several ranks. The
frozen weights have the dtype of the forward pass; the adapters are float32.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paw.config.sections import LoraConfig
from paw.distributed.gather import Shard, gather_in_buckets
from paw.errors import UserError, nearest, needed

BASE_WEIGHT = ".base_layer.weight"
"""The end of a weight's name if peft has put an adapter beside it."""


def check_targets(lm: PreTrainedModel, config: LoraConfig) -> None:
    """Raise UserError if a target is not the name of a linear layer of the decoder."""
    linear_layers: set[str] = set()
    for name, module in lm.get_decoder().named_modules():
        if isinstance(module, nn.Linear):
            linear_layers.add(name.rpartition(".")[2])
    available = sorted(linear_layers)
    for target in config.targets:
        if target not in available:
            hint = nearest(target, available) or f"available: {', '.join(available) or 'none'}"
            raise UserError(
                f"lora.targets: '{target}' is not a linear layer of this model's decoder; {hint}"
            )


def add_adapters(lm: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
    """Freeze `lm` and add trainable float32 adapters.

    Equal seeds give equal adapters. Log-probs do not change. Raises UserError if peft is not
    installed, or if a target names experts.
    """
    peft = needed("peft", "lora.rank", "lora")
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=config.targets
    )
    with torch.random.fork_rng(devices=[]):  # peft draws random numbers on the CPU
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, lm)
    _refuse_experts(lm, config)
    for parameter in lm.parameters():
        if parameter.requires_grad:  # peft gives adapters the dtype of the weights
            parameter.data = parameter.data.float()
    for layer in _lora_layers(lm):
        # The adapters are cast to the input's dtype, not the input to theirs.
        layer.cast_input_dtype_enabled = False


def _refuse_experts(lm: PreTrainedModel, config: LoraConfig) -> None:
    """Raise UserError if peft has adapted expert weights, which are one tensor for all experts.

    peft does so if a target also names such weights.
    """
    expert_words: set[str] = set()
    for layer in _lora_layers(lm):
        expert_words.update(getattr(layer, "parameter_name", "").split("_"))
    expert_words.discard("")
    if expert_words:
        dense_targets = [
            target for target in config.targets if target.split("_")[0] not in expert_words
        ]
        raise UserError(
            f"lora.targets: in a '{lm.config.model_type}' some targets name expert weights, "
            "one tensor for all experts, which cannot have adapters; "
            f"leave them out: --lora.targets '{json.dumps(dense_targets)}'"
        )


@contextmanager
def adapters_off(lm: PreTrainedModel) -> Iterator[None]:
    """Run the model without its adapters in this block, as the reference policy.

    peft's own `enable_adapters` also changes which parameters are trainable, and FSDP reads that
    only once.
    """
    for layer in _lora_layers(lm):
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in _lora_layers(lm):
            layer._disable_adapters = False


def adapter_of(model: nn.Module, name: str) -> list[Tensor]:
    """Return [A, B] beside the weight `name`, as shards if they are sharded; [] if it has none."""
    if not name.endswith(BASE_WEIGHT):
        return []
    layer: Any = model.get_submodule(name.removesuffix(BASE_WEIGHT))
    (adapter,) = layer.scaling
    return [layer.lora_A[adapter].weight.detach(), layer.lora_B[adapter].weight.detach()]


def merged(model: nn.Module, name: str, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return weight [out, in] `name` with A [rank, in] and B [out, rank] added, as a new tensor.

    All are full tensors. The sum is computed in float32 and returned in the dtype of `weight`.
    """
    layer: Any = model.get_submodule(name.removesuffix(BASE_WEIGHT))
    (adapter,) = layer.scaling
    merged_weight = weight.to(torch.float32, copy=True)
    merged_weight.addmm_(b, a, alpha=layer.scaling[adapter])
    return merged_weight.to(weight.dtype)


def adapters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name as in peft's files, full tensor) of every A and B, gathered in buckets."""
    for name, (tensor,) in gather_in_buckets(_adapter_shards(model)):
        yield name, tensor


def _adapter_shards(model: nn.Module) -> Iterator[tuple[str, list[Shard]]]:
    """Yield (name as in peft's files, [A or B])."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            peft_name = f"base_model.model.{name.replace('.default.', '.')}"
            yield peft_name, [Shard(parameter.detach(), parameter.dtype)]


def _lora_layers(lm: nn.Module) -> list[Any]:
    return [module for module in lm.modules() if hasattr(module, "lora_A")]
