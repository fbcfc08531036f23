"""Checkpoints that are whole or absent, hold no code, and know when they are damaged.

    checkpoints/step_000050/
        model.safetensors  optimizer.safetensors  rng.safetensors     tensors, by file stem; model-2.safetensors, ...
                                                                      where there are more than 4 GiB of them
        critic_model.safetensors  critic_optimizer.safetensors        with PPO
        state.json                                                    step, version, and the caller's counters
        manifest.json                                                 size and sha256 of each file above

A save writes a hidden folder, fsyncs it and renames it into place; a load checks the manifest first, for no format in
common use notices a flipped byte. Nothing is ever unpickled.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from paw.errors import UserError
from paw.files import cause, fsync, fsync_tree, json_object, writing

VERSION = 1
PART = 4 << 30
"""Bytes of a file at which the next one begins, so that host memory need not hold more of a sharded model."""
MANIFEST, STATE = "manifest.json", "state.json"
Tensors = dict[str, dict[str, Tensor]]
Named = Iterable[tuple[str, Tensor]]
"""What `named_parameters()` gives."""


class CheckpointError(UserError):
    """A checkpoint that must not be loaded: damaged, incomplete, or of another model. Names the file."""


def save(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor] | Named], state: Mapping[str, Any]
) -> Path:
    """Write `folder`/step_NNNNNN and return it; on any failure the checkpoints already there stay as they were.

    `tensors` maps file stem -> name -> tensor, or -> pairs of name and tensor, which are taken one by one; tied weights
    appear once. `state` holds JSON values. Raises UserError where the disk refuses, ValueError for a NaN in the state.
    """
    text = json.dumps({**state, "version": VERSION, "step": step}, indent=1, allow_nan=False)
    path = folder / f"step_{step:06d}"
    temp, replaced = folder / f".tmp_{path.name}", folder / f".tmp_replaced_{path.name}"
    try:
        with writing(f"checkpoint {path}", "; earlier checkpoints are intact"):
            if not folder.is_dir():
                folder.mkdir(parents=True)
                fsync(folder.parent)
            for leftover in folder.glob(".tmp_*"):  # of a save that was killed
                _remove(leftover)
            temp.mkdir()
            for stem, named in tensors.items():
                pairs: Any = named.items() if isinstance(named, Mapping) else named
                for number, part in enumerate(_parts(pairs), 1):
                    save_file(part, temp / f"{stem}{f'-{number}' if number > 1 else ''}.safetensors")
            (temp / STATE).write_text(text, encoding="utf-8")
            files = {file.name: digest(file) for file in sorted(temp.iterdir())}
            order = 1 + max((_order(other) for other in folder.glob("step_*")), default=0)
            (temp / MANIFEST).write_text(manifest_text(files, order), encoding="utf-8")
            fsync_tree(temp)
            if path.exists():  # a damaged one, or one of a run that was rewound
                path.rename(replaced)
            temp.rename(path)
            fsync(folder)
            _remove(replaced)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return path


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the one saved last first, before it those whose manifest cannot be read."""
    return sorted(folder.glob("step_*"), key=lambda path: (_order(path) or math.inf, path.name), reverse=True)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` (>= 1) checkpoints saved last. A removal cut short leaves no half checkpoint behind."""
    for path in sorted(folder.glob("step_*"), key=lambda path: (_order(path), path.name))[:-keep]:
        path.rename(path.with_name(f".tmp_pruned_{path.name}"))
        _remove(path.with_name(f".tmp_pruned_{path.name}"))


# --- helpers -------------------------------------------------------------------------------------------------------


def _parts(named: Named) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named:
        if part and size + tensor.nbytes > PART:
            yield part
            part, size = {}, 0
        part[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    yield part


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def digest(file: Path) -> dict[str, Any]:
    if not file.is_file():  # reading a pipe would wait for its writer
        raise OSError("not a file")
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def manifest_text(files: dict[str, dict[str, Any]], order: int) -> str:
    """`order` counts the saves of a folder; the last field is the digest of the two before it."""
    body = {"files": files, "order": order}
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": own}, indent=1, sort_keys=True) + "\n"


def read_manifest(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    file = path / MANIFEST
    try:
        if file.exists() and not file.is_file():
            raise OSError("not a file")
        text = file.read_bytes()
    except OSError as error:
        raise damaged(path, MANIFEST, cause(error)) from None
    content = json_object(text) or {}
    files, order = content.get("files"), content.get("order")
    entries = files.values() if isinstance(files, dict) else [None]
    fits = all(isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"} for entry in entries)
    if not fits or not isinstance(files, dict) or type(order) is not int or not 0 < order < 2**53:
        raise damaged(path, MANIFEST, "not a manifest")
    if text != manifest_text(files, order).encode():
        raise damaged(path, MANIFEST, "it does not match its own sha256")
    return files, order


def _order(path: Path) -> int:
    """Position among the folder's saves, 1 first; 0 where the manifest is unreadable."""
    try:
        return read_manifest(path)[1]
    except CheckpointError:
        return 0


def rng_name(rank: int) -> str:
    return f"rng_{rank}" if rank else "rng"


def damaged(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} is damaged ({name}): {what}")
