"""A model's folder on every machine: only that of rank 0 need be complete."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save

from paw.distributed.ranks import Ranks
from paw.io.cache import cached
from paw.io.files import write_file

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
LARGEST = 64 << 20
"""Bytes from which on a file is no longer taken for one of tokenizer, template or configuration."""


def on_this_machine(path: str, ranks: Ranks) -> str:
    """The path of a model's folder on this machine: `path`, or a copy of rank 0's in the cache.

    A copy is made if this machine lacks rank 0's files. It has all of them but the weights, of
    which each rank is sent its share. Called by all ranks.
    """
    content = _pack_small_files(Path(path).expanduser())
    digests = ranks.gather((hashlib.sha256(content).hexdigest(), len(content)), tuple[str, int])
    rank0_digest, rank0_size = digests[0]
    if not rank0_size or len(set(digests)) == 1:
        return path

    if ranks.first:
        packed = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    else:
        packed = torch.empty(rank0_size, dtype=torch.uint8)
    ranks.broadcast(packed, 0)
    if digests[ranks.rank] == digests[0]:
        return path

    def unpack(folder: Path) -> None:
        for name, file_bytes in load(packed.numpy().tobytes()).items():
            write_file(folder / Path(name).name, file_bytes.numpy().tobytes())

    return str(cached(f"model-{rank0_digest[:16]}", unpack))


def _pack_small_files(folder: Path) -> bytes:
    """All files of a folder but weights, as one safetensors file; b"" if there are none."""
    tensors = {}
    for file in sorted(folder.glob("*")):
        if file.is_file() and file.suffix not in WEIGHTS and file.stat().st_size < LARGEST:
            tensors[file.name] = torch.from_numpy(np.fromfile(file, np.uint8))
    return save(tensors) if tensors else b""
