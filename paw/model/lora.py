"""LoRA (Hu et al., arXiv 2106.09685): low-rank adapters beside frozen weights, made by peft.

    W' = W + alpha / rank * B A        W [out, in], A [rank, in] random and B [out, rank] zero at the start

peft puts its layers into the model in place: `q_proj.weight` becomes `q_proj.base_layer.weight`, beside
`q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. vLLM is sent
those alone (or W'); the export, and the transformers engine of several ranks, see W' under the old names.
The frozen weights stay in the dtype of the forward pass, the adapters in float32.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paw.config import LoraConfig
from paw.errors import UserError, nearest, needed
from paw.model.ranks import full_tensor


def check_targets(lm: PreTrainedModel, config: LoraConfig) -> None:
    """UserError for a target that names no linear layer of the decoder."""
    modules = lm.get_decoder().named_modules()
    known = sorted({name.rpartition(".")[2] for name, module in modules if isinstance(module, nn.Linear)})
    for target in config.targets:
        if target not in known:
            hint = nearest(target, known) or f"there are: {', '.join(known) or 'none'}"
            raise UserError(f"lora.targets: '{target}' is no linear layer of this model's decoder; {hint}")


def add_adapters(lm: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
    """Freeze `lm` and add trainable float32 adapters, the same ones for the same seed; log-probs stay what they were.

    Raises UserError without peft, and for targets that name experts.
    """
    peft = needed("peft", "lora.rank", "lora")
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=config.targets)
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, lm)
    fused = {word for layer in _layers(lm) for word in getattr(layer, "parameter_name", "").split("_") if word}
    if fused:  # peft adapts these too where a target is also the name of a dense layer
        apart = [target for target in config.targets if target.split("_")[0] not in fused]
        raise UserError(
            f"lora.targets: in a '{lm.config.model_type}' some name weights of experts, one tensor for all, which "
            f"get no adapters here; leave them out: --lora.targets '{json.dumps(apart)}'"
        )
    for parameter in lm.parameters():
        if parameter.requires_grad:  # peft gives them the dtype of the weights
            parameter.data = parameter.data.float()
    for layer in _layers(lm):
        layer.cast_input_dtype_enabled = False  # to the adapters' stored float32; they are seen in the input's dtype


@contextmanager
def adapters_off(lm: PreTrainedModel) -> Iterator[None]:
    """The model without its adapters, if it has any: the reference policy.

    Not by peft's `enable_adapters`, which makes parameters trainable or not: FSDP takes that over from them only once.
    """
    for layer in _layers(lm):
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in _layers(lm):
            layer._disable_adapters = False


def merged(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """`weight`, the whole parameter `name` of one of peft's layers, with its adapter added; a new tensor then."""
    if name.endswith(".bias"):
        return weight
    layer: Any = model.get_submodule(name.removesuffix(".base_layer.weight"))
    (key,) = layer.scaling
    a, b = (full_tensor(part[key].weight.detach()) for part in (layer.lora_A, layer.lora_B))
    return torch.addmm(weight.float(), b, a, alpha=layer.scaling[key]).to(weight.dtype)


def adapters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name as in peft's files, full tensor) of every A and B, one gathered at a time."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield f"base_model.model.{name.replace('.default.', '.')}", full_tensor(parameter.detach())


def _layers(lm: nn.Module) -> list[Any]:
    return [module for module in lm.modules() if hasattr(module, "lora_A")]
