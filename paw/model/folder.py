"""Copies of a model's folder on every machine. Only rank 0's folder has to be complete."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save

from paw.distributed.ranks import Ranks
from paw.io.cache import ensure_cached
from paw.io.files import write_file

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
MAX_BYTES = 64 << 20
"""Files of at least this many bytes are not copied as tokenizers, templates or configurations."""


def copy_to_this_machine(path: str, ranks: Ranks) -> str:
    """Copy rank 0's model folder into the cache if this machine lacks its files. All ranks must
    call it.

    Returns the path of the folder on this machine, which is `path` or the copy. The copy has all
    files except the weights, because each rank is sent its share of those.
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

    return str(ensure_cached(f"model-{rank0_digest[:16]}", unpack))


def _pack_small_files(folder: Path) -> bytes:
    """Pack a folder's files except weights into one safetensors file; b"" if there are none."""
    tensors = {}
    for path in sorted(folder.glob("*")):
        if path.is_file() and path.suffix not in WEIGHTS and path.stat().st_size < MAX_BYTES:
            tensors[path.name] = torch.from_numpy(np.fromfile(path, np.uint8))
    if not tensors:
        return b""
    return save(tensors)
