"""The precision of a model's computations that model.dtype = "auto" chooses."""

from collections.abc import Collection
from pathlib import Path

import torch

from paw.config.sections import Config
from paw.io.files import text_of

BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16", "sve_bf16", "svebf16"})
"""x86 and ARM instruction sets for bfloat16, as torch and the Linux kernel name them."""


def cpu_features() -> frozenset[str]:
    """Return this CPU's instruction sets, from torch or, if torch is too old, the Linux kernel."""
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return frozenset(name for name, present in capabilities.items() if present is True)
    return frozenset(text_of(Path("/proc/cpuinfo")).split())


def pick_dtype(device: torch.device, features: Collection[str] | None = None) -> str:
    """Return bfloat16 on a GPU, and on a CPU with instructions for it, else float32.

    Without these instructions, torch emulates bfloat16 many times slower than float32. `features`
    are the CPU's instruction sets (default: this machine's).
    """
    if device.type == "cuda":
        return "bfloat16"
    if features is None:
        features = cpu_features()
    if BFLOAT16.intersection(features):
        return "bfloat16"
    return "float32"


def training_dtype(config: Config, device: torch.device) -> str:
    """Return the dtype in which `config` is trained on this machine.

    It is the dtype that model.dtype names, or else the one that the optimizer needs, or else the
    one that suits `device`.
    """
    if config.model.dtype != "auto":
        return config.model.dtype
    if config.optim.name == "flash-adamw":  # it keeps bf16 weights
        return "bfloat16"
    return pick_dtype(device)


def with_dtype(config: Config, dtype: str) -> Config:
    """Return `config` with `dtype` in place of "auto"."""
    if config.model.dtype != "auto":
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
