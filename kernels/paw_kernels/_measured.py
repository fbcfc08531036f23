"""Times that `paw doctor --kernels` measured on this machine. `auto` takes the shortest.

They are in a JSON file. Only times with the same device, driver, torch, triton and kernels (`key`),
dtype, V and D count. Without the file, or such times in it, this module has no effect.
"""

import hashlib
import json
import math
import os
import platform
import re
import warnings
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Time(NamedTuple):
    """Time of a forward and backward pass over n rows of a [V, D] head."""

    backend: str
    dtype: str
    V: int
    D: int
    n: int
    ms: float
    tiles: dict[str, Any] | None = None
    """Fields of `_triton.Tiles`."""


def file() -> Path:
    """Return kernels.json in $PAW_CACHE, else in $XDG_CACHE_HOME/paw, else in ~/.cache/paw."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PAW_CACHE") or Path(home) / "paw") / "kernels.json"


def fastest(
    device: torch.device,
    dtype: torch.dtype,
    V: int,
    D: int,
    n: int | None = None,
    backend: str | None = None,
) -> Time | None:
    """Return the shortest time of that backend or of any.

    It is for the measured n nearest to n (None: the largest).
    """
    dtype_name = str(dtype).removeprefix("torch.")
    measured = [
        time
        for time in times(file(), device)
        if (time.dtype, time.V, time.D) == (dtype_name, V, D) and backend in (None, time.backend)
    ]
    if not measured:
        return None
    sizes = {time.n for time in measured}
    nearest = max(sizes)
    if n is not None:
        rows = max(n, 1)
        nearest = min(sizes, key=lambda size: abs(math.log(size / rows)))
    return min((time for time in measured if time.n == nearest), key=lambda time: time.ms)


@cache
def times(path: Path, device: torch.device) -> tuple[Time, ...]:
    """Return the times of this device with its current software.

    The file is read once per process. If it cannot be read, this warns and returns no times.
    """
    try:
        return tuple(
            Time(**time)
            for time in json.loads(path.read_text(encoding="utf-8")).get(key(device), ())
        )
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{path} is ignored ({error}): paw doctor --kernels writes a new one",
            RuntimeWarning,
            stacklevel=2,
        )
        return ()


@cache
def key(device: torch.device) -> str:
    """Return the device and the versions of driver, torch, triton and kernels, including compiled
    kernels. Times under other keys are not comparable."""
    name = platform.processor() or platform.machine()
    driver = ""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        driver = _match(r"(\d+\.[\d.]+)", "/proc/driver/nvidia/version")
    elif device.type == "cpu":
        name = _match(r"model name\s*: (.+)", "/proc/cpuinfo") or name
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    kernels = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.*")):
        if source.suffix in (".py", ".so", ".pyd"):
            kernels.update(source.name.encode() + source.read_bytes())
    version = kernels.hexdigest()[:12]
    return f"{name}, driver {driver or 'none'}, torch {torch.__version__}, triton {triton}, kernels {version}"


def _match(pattern: str, path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(pattern, text)
    return match[1] if match else ""
