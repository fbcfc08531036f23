"""A model's folder on every machine: it need be whole on that of rank 0 alone."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load, save

from paw.cache import cached
from paw.files import write_file

if TYPE_CHECKING:
    from paw.model.ranks import Ranks

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
LARGEST = 64 << 20
"""Bytes of a file that is still taken for one of tokenizer, template or configuration."""


def on_this_machine(path: str, ranks: "Ranks") -> str:
    """`path`, or where it is a folder of rank 0's machine whose files are not here, a copy of it in the cache.

    But for the weights, which each rank is sent its share of. A call of all ranks.
    """
    own = _small_files(Path(path).expanduser())
    found = ranks.gather((hashlib.sha256(own).hexdigest(), len(own)), tuple[str, int])
    digest, size = found[0]
    if not size or len(set(found)) == 1:
        return path
    sent = (
        torch.frombuffer(bytearray(own), dtype=torch.uint8)
        if ranks.first
        else torch.empty(size, dtype=torch.uint8)
    )
    ranks.broadcast(sent, 0)

    def fill(folder: Path) -> None:
        for name, content in load(sent.numpy().tobytes()).items():
            write_file(folder / Path(name).name, content.numpy().tobytes())

    return path if found[ranks.rank] == found[0] else str(cached(f"model-{digest[:16]}", fill))


def _small_files(folder: Path) -> bytes:
    """All files but weights, as one; nothing where there are none."""
    files = [
        file for file in sorted(folder.glob("*")) if file.is_file() and file.suffix not in WEIGHTS
    ]
    tensors = {
        file.name: torch.from_numpy(np.fromfile(file, np.uint8))
        for file in files
        if file.stat().st_size < LARGEST
    }
    return save(tensors) if tensors else b""
