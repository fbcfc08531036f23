"""What `paw doctor --kernels` measured on this machine: a JSON file of times, of which `auto` takes the least.

Only times of the same device, driver, torch, triton and kernels count (`key`), and of the same dtype, V and D. Without
the file, or such times in it, nothing here decides.
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
    """Of a forward and backward pass over n rows of a [V, D] head."""

    backend: str
    dtype: str
    V: int
    D: int
    n: int
    ms: float
    tiles: dict[str, Any] | None = None
    """Fields of `_triton.Tiles`."""


def file() -> Path:
    """kernels.json in $PAW_CACHE, else in $XDG_CACHE_HOME/paw, else in ~/.cache/paw."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PAW_CACHE") or Path(home) / "paw") / "kernels.json"


def fastest(
    device: torch.device, dtype: torch.dtype, V: int, D: int, n: int | None = None, backend: str | None = None
) -> Time | None:
    """The least time at the measured n that is nearest to n (None: the largest), of that backend or of any."""
    kind = str(dtype).removeprefix("torch.")
    of = [t for t in times(file(), device) if (t.dtype, t.V, t.D) == (kind, V, D) and backend in (None, t.backend)]
    if not of:
        return None
    nearest = min({t.n for t in of}, key=lambda m: -m if n is None else abs(math.log(m / max(n, 1))))
    return min((t for t in of if t.n == nearest), key=lambda t: t.ms)


@cache
def times(path: Path, device: torch.device) -> tuple[Time, ...]:
    """Those of this device as it is now; a file that cannot be read is a warning, and none. Read once a process."""
    try:
        return tuple(Time(**time) for time in json.loads(path.read_text(encoding="utf-8")).get(key(device), ()))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{path} is left out ({error}): paw doctor --kernels writes it anew", RuntimeWarning, stacklevel=2
        )
        return ()


@cache
def key(device: torch.device) -> str:
    """Device, driver, torch, triton and kernels, compiled ones included; a time of others says nothing here."""
    name, driver = platform.processor() or platform.machine(), ""
    if device.type == "cuda":
        name, driver = torch.cuda.get_device_name(device), _match(r"(\d+\.[\d.]+)", "/proc/driver/nvidia/version")
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
        found = re.search(pattern, Path(path).read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found[1] if found else ""
