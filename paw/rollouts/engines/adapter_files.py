"""LoRA adapters as files that vLLM reads."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from paw.config.sections import LoraConfig
from paw.io.files import writing
from paw.rollouts.engines.vllm_library import WEIGHTS_DIR_HINT


def write_adapters(
    folder: Path,
    adapters: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    lora: LoraConfig,
    name: str,
) -> None:
    """Write adapters into a folder as peft does, with the tensors in its file `name`.

    If `adapters` are sharded, every rank must call this.
    """
    tensors = {key: tensor.to("cpu", dtype).contiguous() for key, tensor in adapters}
    settings = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": lora.targets,
    }
    with writing(folder, WEIGHTS_DIR_HINT):
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, folder / name, {"format": "pt"})
