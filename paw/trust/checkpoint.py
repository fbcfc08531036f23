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
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paw.errors import UserError, to_stderr
from paw.learner.distributed import sharded_like, whole
from paw.trust.files import cause, fsync, fsync_tree

VERSION = 1
PART = 4 << 30
"""Bytes of a file at which the next one begins, so that host memory need not hold more of a sharded model."""
MANIFEST, STATE = "manifest.json", "state.json"
Tensors = dict[str, dict[str, Tensor]]
Named = Iterable[tuple[str, Tensor]]
"""What `named_parameters()` gives."""


@runtime_checkable
class Compressed(Protocol):
    """An optimizer whose state is not made of plain tensors: flash-adamw."""

    def state_tensors(self, p: Tensor) -> dict[str, Tensor]: ...
    def load_tensors(self, p: Tensor, tensors: Mapping[str, Tensor]) -> None: ...


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
            shutil.rmtree(leftover)
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
        shutil.rmtree(folder / f".tmp_replaced_{path.name}", ignore_errors=True)
    except (OSError, SafetensorError) as error:  # Python ignores SIGXFSZ: a file size limit is an OSError too
        raise UserError(f"cannot save checkpoint {path}: {cause(error)}; earlier checkpoints are intact") from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return path


def verify(path: Path) -> None:
    """Check every file of a checkpoint against its manifest; reads all bytes once.

    Raises CheckpointError naming the first file that is missing, unexpected, truncated or altered.
    """
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}")
    files, _ = _read_manifest(path)
    found = {file.name for file in path.iterdir()} - {MANIFEST}
    for name in sorted(files.keys() | found):
        if name not in found:
            raise _damaged(path, name, "the file is missing")
        if name not in files:
            raise _damaged(path, name, "not a file of this checkpoint")
        try:
            now = _describe(path / name)
        except OSError as error:
            raise _damaged(path, name, cause(error)) from None
        if now["bytes"] != files[name]["bytes"]:
            raise _damaged(path, name, f"{now['bytes']} bytes instead of {files[name]['bytes']}")
        if now != files[name]:
            raise _damaged(path, name, "its sha256 differs from the manifest's")


def load(path: Path, *, like: Mapping[str, Mapping[str, Tensor]] | None = None) -> tuple[Tensors, dict[str, Any]]:
    """Verify a checkpoint and read it: (file stem -> name -> CPU tensor, state).

    `like` gives, for the stems it holds, the names, shapes and dtypes the file must have, e.g.
    `{"model": dict(model.named_parameters())}`. The tensors are mapped from disk; copy what must outlive the files.

    Raises CheckpointError naming the file, for damage, another version, or tensors that do not fit `like`.
    """
    verify(path)
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, STATE, str(error)) from None
    if state.get("version") != VERSION:
        raise CheckpointError(f"checkpoint {path}: {STATE} has version {state.get('version')}, not {VERSION}")
    tensors: Tensors = defaultdict(dict)
    for file in sorted(path.glob("*.safetensors")):
        try:
            tensors[file.stem.partition("-")[0]].update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise _damaged(path, file.name, cause(error)) from None
    for stem, expected in (like or {}).items():
        _check_fit(tensors.get(stem, {}), expected, origin=f"{path / stem}.safetensors")
    return tensors, state


def latest(folder: Path, warn: Callable[[str], None] = to_stderr) -> Path | None:
    """The checkpoint saved last that verifies, or None where there is none at all.

    Each damaged one passed over is told to `warn` (default: standard error). Saved last, not highest step: after a
    rewind to an older checkpoint the new branch counts. Raises CheckpointError when there are only damaged ones, rather
    than silently starting over.
    """
    damaged: list[CheckpointError] = []
    for path in sorted(folder.glob("step_*"), key=lambda path: (_order(path) or math.inf, path.name), reverse=True):
        try:
            verify(path)
        except CheckpointError as error:
            damaged.append(error)
            continue
        for error in damaged:
            warn(f"{error}: using {path.name}")
        return path
    if damaged:
        raise CheckpointError(f"{damaged[0]}; no other checkpoint in {folder} verifies: use another --run.name")
    return None


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` (>= 1) checkpoints saved last. A removal cut short leaves no half checkpoint behind."""
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least 1")
    for path in sorted(folder.glob("step_*"), key=lambda path: (_order(path), path.name))[:-keep]:
        path.rename(path.with_name(f".tmp_pruned_{path.name}"))
        shutil.rmtree(path.with_name(f".tmp_pruned_{path.name}"), ignore_errors=True)


# --- training state as tensors -------------------------------------------------------------------------------------


def optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: Named,
    gathered: Callable[[Named], Any] = lambda named: {name: whole(tensor).detach().cpu() for name, tensor in named},
) -> tuple[Any, dict[str, Any]]:
    """An optimizer's state as ("<parameter>/<key>" -> tensor, JSON); for torch's AdamW: step, exp_avg, exp_avg_sq.

    Sharded tensors (DTensor) are made whole by `gathered`, in which every rank must take part; what it gives is the
    first part of the answer. Those in host memory are not copied. Parameters without state are left out.
    """
    names = {parameter: name for name, parameter in parameters}

    def named() -> Iterator[tuple[str, Tensor]]:
        for parameter, values in optimizer.state.items():
            if isinstance(optimizer, Compressed):
                values = optimizer.state_tensors(parameter)
            for key, value in values.items():
                yield f"{names[parameter]}/{key}", torch.as_tensor(value)

    return gathered(named()), {
        "class": type(optimizer).__name__,
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Named, tensors: Mapping[str, Tensor], info: Mapping[str, Any]
) -> None:
    """Put `optimizer_tensors` back, bit for bit, onto each parameter's device and sharding.

    Learning rates are restored too; betas, weight decay and the like stay as the optimizer was built. Raises
    CheckpointError where class, names or shapes do not fit.
    """
    if info["class"] != type(optimizer).__name__ or len(info["lr"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"optimizer.safetensors: written by {info['class']} with {len(info['lr'])} parameter groups, "
            f"this run has {type(optimizer).__name__} with {len(optimizer.param_groups)}"
        )
    by_name = dict(parameters)
    compressed: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    restored: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
    for full_name, tensor in tensors.items():
        name, key = full_name.rsplit("/", 1)
        parameter = by_name.get(name)
        if parameter is None or parameter not in group_of:
            raise CheckpointError(f"optimizer.safetensors: '{full_name}' belongs to no parameter of this run")
        if isinstance(optimizer, Compressed):
            compressed[parameter][key] = tensor
        elif key == "step":
            group = group_of[parameter]
            on_device = group.get("fused") or group.get("capturable")
            restored[parameter][key] = tensor.to(parameter.device if on_device else "cpu", copy=True)
        elif tensor.shape == parameter.shape:
            restored[parameter][key] = sharded_like(parameter, tensor)
        else:
            shapes = f"has shape {list(tensor.shape)}, the parameter {list(parameter.shape)}"
            raise CheckpointError(f"optimizer.safetensors: '{full_name}' {shapes}")
    # Set directly: Optimizer.load_state_dict casts state to the parameter's dtype.
    optimizer.state.clear()
    optimizer.state.update(restored)
    for parameter, values in compressed.items():
        try:
            optimizer.load_tensors(parameter, values)  # type: ignore[attr-defined]
        except KeyError as error:
            raise CheckpointError(
                f"optimizer.safetensors: {error} is missing; was optim.master_bits another?"
            ) from None
    for group, lr in zip(optimizer.param_groups, info["lr"], strict=True):
        group["lr"] = lr


def rng_tensors() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Global random states of torch (CPU, and the current CUDA device), python and numpy: (tensors, JSON).

    Each process has its own: with several ranks save one pair a rank.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors, {"python": [version, gauss], "numpy": [kind, int(position), int(has_gauss), float(cached)]}


def load_rng(tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Put `rng_tensors` back. A CUDA state is left aside on a machine without CUDA."""
    version, gauss = info["python"]
    kind, position, has_gauss, cached = info["numpy"]
    torch.set_rng_state(tensors["torch"].clone())
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"].clone())


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


def _describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _manifest(files: dict[str, dict[str, Any]], order: int) -> str:
    """`order` counts the saves of a folder; the last field is the digest of the two before it."""
    body = {"files": files, "order": order}
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": own}, indent=1, sort_keys=True) + "\n"


def _read_manifest(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        content = json.loads(text)
        files, order = content["files"], content["order"]
    except OSError as error:
        raise _damaged(path, MANIFEST, cause(error)) from None
    except (ValueError, KeyError, TypeError):
        raise _damaged(path, MANIFEST, "not a manifest") from None
    if text != _manifest(files, order):
        raise _damaged(path, MANIFEST, "it does not match its own sha256")
    return files, order


def _order(path: Path) -> int:
    """Position among the folder's saves, 1 first; 0 where the manifest is unreadable."""
    try:
        return _read_manifest(path)[1]
    except CheckpointError:
        return 0


def _damaged(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} is damaged ({name}): {what}")
