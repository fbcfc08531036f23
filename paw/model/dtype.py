"""Which precision a model is computed in: what model.dtype = "auto" chooses."""

from collections.abc import Collection
from pathlib import Path

import torch

from paw.config import Config
from paw.files import text_of

BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16", "sve_bf16", "svebf16"})
"""Instruction sets that compute in bfloat16, of x86 and ARM, as torch and the Linux kernel name them."""


def cpu_features() -> frozenset[str]:
    """The instruction sets of this CPU, as torch names them; an older torch does not, the Linux kernel does."""
    if hasattr(torch.cpu, "get_capabilities"):
        return frozenset(
            name for name, there in torch.cpu.get_capabilities().items() if there is True
        )
    return frozenset(text_of(Path("/proc/cpuinfo")).split())


def pick_dtype(device: torch.device, features: Collection[str] | None = None) -> str:
    """bfloat16 on a GPU, and on a CPU whose `features` (default: this one's) have instructions for it, else float32.

    Without those instructions torch emulates bfloat16, many times slower than it computes in
    float32.
    """
    if device.type == "cuda":
        return "bfloat16"
    if features is None:
        features = cpu_features()
    return "bfloat16" if BFLOAT16.intersection(features) else "float32"


def training_dtype(config: Config, device: torch.device) -> str:
    """What `config` is trained in on this machine: what it names, what its optimizer needs, or what suits `device`."""
    if config.model.dtype != "auto":
        return config.model.dtype
    if config.optim.name == "flash-adamw":  # it keeps bf16 weights
        return "bfloat16"
    return pick_dtype(device)


def with_dtype(config: Config, dtype: str) -> Config:
    """`config` with `dtype` in place of "auto"."""
    if config.model.dtype != "auto":
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
