"""Checkpoints that are whole or absent, hold no code, and know when they are damaged.

    checkpoints/step_000050/
        model.safetensors  optimizer.safetensors  rng.safetensors     tensors, by file stem; model-2.safetensors, ...
                                                                      where there are more than 4 GiB of them
        critic_model.safetensors  critic_optimizer.safetensors        with PPO
        state.json                                                    step, version, and the caller's counters
        manifest.json                                                 size and sha256 of each file above

A save writes a hidden folder, fsyncs it and renames it into place. No format in common use notices a flipped byte, so
every load checks the manifest first. Nothing is ever unpickled.
"""

import hashlib
import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paw.errors import UserError, shown, to_stderr
from paw.files import cause, fsync, fsync_tree, json_object

VERSION = 1
PART = 4 << 30
"""Bytes of a file at which the next one begins, so that host memory need not hold more of a sharded model."""
MANIFEST, STATE = "manifest.json", "state.json"
T = TypeVar("T")
Tensors = dict[str, dict[str, Tensor]]
Named = Iterable[tuple[str, Tensor]]
"""What `named_parameters()` gives."""


class CheckpointError(UserError):
    """A checkpoint that must not be loaded: damaged, incomplete, or of another model. Names the file."""


def save(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor] | Named], state: Mapping[str, Any]
) -> Path:
    """Write `folder`/step_NNNNNN and return it; on any failure the checkpoints already there stay as they were.

    `folder` is the run's `checkpoints` folder, made if missing; one process writes to it. `tensors` maps file stem ->
    name -> tensor, of any dtype and device; tied weights appear once (`named_parameters()` leaves the second name out).
    Pairs of name and tensor instead are taken one by one, in order. `state` holds JSON values; "step" (updates done)
    and "version" are added.

    Raises UserError, one line with the path and the cause, where the disk is full, read-only or otherwise refuses;
    ValueError for a state that JSON cannot hold exactly (NaN, infinity), or a stem that is no plain name.
    """
    for stem in tensors:
        if not re.fullmatch(r"\w+", stem):
            raise ValueError(f"file stem {stem!r}: use letters, digits and _")
    text = json.dumps({**state, "version": VERSION, "step": step}, indent=1, allow_nan=False)
    path = folder / f"step_{step:06d}"
    temp = folder / f".tmp_{path.name}"
    try:
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
        files = {file.name: _describe(file) for file in sorted(temp.iterdir())}
        order = 1 + max((_order(other) for other in folder.glob("step_*")), default=0)
        (temp / MANIFEST).write_text(_manifest(files, order), encoding="utf-8")
        fsync_tree(temp)
        if path.exists():  # a damaged one, or one of a run that was rewound
            path.rename(folder / f".tmp_replaced_{path.name}")
        temp.rename(path)
        fsync(folder)
        _remove(folder / f".tmp_replaced_{path.name}")
    except (OSError, SafetensorError) as error:  # Python ignores SIGXFSZ: a file size limit is an OSError too
        raise UserError(f"cannot save checkpoint {path}: {cause(error)}; earlier checkpoints are intact") from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return path


def verify(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest, which reads all bytes once; returns what state.json holds.

    Raises CheckpointError naming the first file that is missing, unexpected, truncated or altered, or another version.
    """
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}")
    files, _ = _read_manifest(path)
    found = {file.name for file in path.iterdir()} - {MANIFEST}
    for name in sorted(files.keys() | found):
        if name not in found:
            raise damaged(path, name, "the file is missing")
        if name not in files:
            raise damaged(path, name, "not a file of this checkpoint")
        try:
            now = _describe(path / name)
        except OSError as error:
            raise damaged(path, name, cause(error)) from None
        if now["bytes"] != files[name]["bytes"]:
            raise damaged(path, name, f"{now['bytes']} bytes instead of {files[name]['bytes']}")
        if now != files[name]:
            raise damaged(path, name, "its sha256 differs from the manifest's")
    state = json_object((path / STATE).read_bytes()) if STATE in files else None
    if state is None:
        raise damaged(path, STATE, "not a JSON object")
    if state.get("version") != VERSION:
        raise CheckpointError(f"checkpoint {path}: {STATE} has version {shown(state.get('version'))}, not {VERSION}")
    if type(state.get("step")) is not int or not 0 <= state["step"] < 2**53:
        raise damaged(path, STATE, f"step = {shown(state.get('step'))} counts no updates")
    return state


def load(path: Path, *, like: Mapping[str, Mapping[str, Tensor]] | None = None) -> tuple[Tensors, dict[str, Any]]:
    """Verify a checkpoint and read it: (file stem -> name -> CPU tensor, state).

    `like` gives, for the stems it holds, the names, shapes and dtypes the file must have, e.g.
    `{"model": dict(model.named_parameters())}`. The tensors are mapped from disk; copy what must outlive the files.

    Raises CheckpointError naming the file, for damage, another version, or tensors that do not fit `like`.
    """
    state = verify(path)
    tensors: Tensors = defaultdict(dict)
    for file in sorted(path.glob("*.safetensors")):
        try:
            tensors[file.stem.partition("-")[0]].update(load_file(file))
        except Exception as error:  # of whatever kind: the manifest says nothing about the sense of the bytes
            raise damaged(path, file.name, cause(error)) from None
    for stem, expected in (like or {}).items():
        _check_fit(tensors.get(stem, {}), expected, origin=f"{path / stem}.safetensors")
    return tensors, state


def latest(folder: Path, warn: Callable[[str], None] = to_stderr) -> Path | None:
    """The checkpoint saved last that verifies, or None where there is none at all; see `newest`."""
    found = newest(folder, verify, warn)
    return found and found[0]


def newest(folder: Path, read: Callable[[Path], T], warn: Callable[[str], None] = to_stderr) -> tuple[Path, T] | None:
    """The checkpoint saved last that `read` takes, and what it makes of it; None where there is none at all.

    `read` refuses with CheckpointError. Each one passed over is reported to `warn` (default: standard error). Saved
    last, not highest step: after a rewind to an older checkpoint the new branch counts. Raises CheckpointError when
    there are only damaged ones, rather than silently starting over.
    """
    refused: list[CheckpointError] = []
    for path in saved(folder):
        try:
            made = read(path)
        except CheckpointError as error:
            refused.append(error)
            continue
        for error in refused:
            warn(f"{error}: using {path.name}")
        return path, made
    if refused:
        raise CheckpointError(f"{refused[0]}; no other checkpoint in {folder} can be used: take another --run.name")
    return None


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the one saved last first, before it those whose manifest cannot be read."""
    return sorted(folder.glob("step_*"), key=lambda path: (_order(path) or math.inf, path.name), reverse=True)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` (>= 1) checkpoints saved last. A removal cut short leaves no half checkpoint behind."""
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least 1")
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


def _check_fit(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, origin: str) -> None:
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise CheckpointError(f"{origin}: '{name}' is missing; was it saved with another model?")
        if name not in expected:
            raise CheckpointError(f"{origin}: '{name}' is not in this model; was it saved with another one?")
        has, wants = found[name], expected[name]
        if has.shape != wants.shape or has.dtype != wants.dtype:
            needs = f"{wants.dtype} {list(wants.shape)}"
            raise CheckpointError(f"{origin}: '{name}' is {has.dtype} {list(has.shape)}, this model needs {needs}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _describe(file: Path) -> dict[str, Any]:
    if not file.is_file():  # reading a pipe would wait for its writer
        raise OSError("not a file")
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _manifest(files: dict[str, dict[str, Any]], order: int) -> str:
    """`order` counts the saves of a folder; the last field is the digest of the two before it."""
    body = {"files": files, "order": order}
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": own}, indent=1, sort_keys=True) + "\n"


def _read_manifest(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    try:
        if (path / MANIFEST).exists() and not (path / MANIFEST).is_file():
            raise OSError("not a file")
        text = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise damaged(path, MANIFEST, cause(error)) from None
    content = json_object(text) or {}
    files, order = content.get("files"), content.get("order")
    entries = files.values() if isinstance(files, dict) else [None]
    if not all(isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"} for entry in entries):
        raise damaged(path, MANIFEST, "not a manifest")
    if type(order) is not int or not 0 < order < 2**53:
        raise damaged(path, MANIFEST, "not a manifest")
    if text != _manifest(files, order).encode():  # type: ignore[arg-type]
        raise damaged(path, MANIFEST, "it does not match its own sha256")
    return files, order  # type: ignore[return-value]


def _order(path: Path) -> int:
    """Position among the folder's saves, 1 first; 0 where the manifest is unreadable."""
    try:
        return _read_manifest(path)[1]
    except CheckpointError:
        return 0


def damaged(path: Path, name: str, what: str) -> CheckpointError:
    """The error that names a checkpoint's file and what is wrong with it."""
    return CheckpointError(f"checkpoint {path} is damaged ({name}): {what}")
