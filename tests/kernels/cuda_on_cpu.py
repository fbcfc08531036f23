"""Builds csrc/*.cu against cuda_on_cpu.h, which gives operators torch.ops.paw_on_cpu for CPU
tensors."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from paw_kernels import _native

ROOT = Path(__file__).parents[2]
HEADER = Path(__file__).with_name("cuda_on_cpu.h")
SOURCES = [ROOT / "csrc" / name for name in ("rows.cu", "select.cu", "torch_cuda.cpp")]
NAMES = ("row_statistics", "row_gradient_", "pack")
LIBRARY = torch.library.Library("paw_on_cpu", "FRAGMENT")
TORCH = Path(torch.__file__).parent

assert _native  # defines the operators whose schemas are copied here
for name in NAMES:
    # Collecting doctests imports this file under another name.
    if not hasattr(torch.ops.paw_on_cpu, name):
        LIBRARY.define(
            str(getattr(torch.ops.paw_kernels, name).default._schema).removeprefix("paw_kernels::")
        )


class Machine(NamedTuple):
    """Where the operators run: on a GPU, or in its emulation with a given order of turns."""

    ops: Any
    device: str

    def put(self, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
        return [None if tensor is None else tensor.to(self.device, copy=True) for tensor in tensors]


def compile_for_cpu(output: Path, *sources: Path) -> ctypes.CDLL:
    """Compiles the sources. A misaligned vector access, which would fail in CUDA, ends the
    process."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    options = "-std=c++17 -O1 -fPIC -shared -w -fno-strict-aliasing -fno-gnu-unique -fsanitize=alignment,bounds"
    options += " -fsanitize-undefined-trap-on-error -DPAW_NAMESPACE=paw_on_cpu -DPAW_DEVICE=CPU"
    paths = [
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        "-I",
        TORCH / "include",
        "-include",
        HEADER,
        "-o",
        output,
    ]
    linking = ["-x", "none", "-L", TORCH / "lib", "-Wl,--no-as-needed", "-ltorch"]
    subprocess.run(
        [compiler, *options.split(), *paths, "-x", "c++", *sources, *linking], check=True
    )
    return ctypes.CDLL(str(output))
