"""Prints as JSON what a table of measurements says about the machine: GPUs, driver, versions.

This is a separate process, so that no CUDA context stays behind and takes memory from the
measurements.
"""

import importlib.metadata
import json
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import commit, cpu_name

PACKAGES = ("triton", "vllm", "flash-attn", "transformers")


def facts() -> dict[str, str]:
    """The columns that are the same in every row of the table. `gpus` is "0" without a GPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    columns = {
        "device": cpu_name(),
        "gpus": str(gpus),
        "gib": "",
        "driver": _driver() if gpus else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
    }
    if gpus:
        properties = torch.cuda.get_device_properties(0)
        columns["device"] = properties.name
        columns["gib"] = f"{properties.total_memory / 2**30:.1f}"
    for package in PACKAGES:
        columns[package] = _version(package)
    return columns | {"paw": _version("paw-trainer"), "commit": commit("paw", "kernels", "csrc")}


def _version(package: str) -> str:
    """The installed version, or "" if the package is missing."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def _driver() -> str:
    """The version of NVIDIA's driver, or "" if nvidia-smi does not report it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return answer.stdout.strip().splitlines()[0]
    return ""


if __name__ == "__main__":
    print(json.dumps(facts()))
