"""Checkpoints that are whole or absent, hold no code, and know when they are damaged.

    checkpoints/step_000050/
        model.safetensors  optimizer.safetensors  rng.safetensors     tensors, by file stem; model-2.safetensors, ...
                                                                      where there are more than 4 GiB of them
        critic_model.safetensors  critic_optimizer.safetensors        with PPO
        state.json                                                    step, version, and the caller's counters
        manifest.json                                                 size and sha256 of each file above

Of several ranks each writes what it holds, `model.rank_1.safetensors`: its rows of every tensor. The rows of all ranks,
one after another, are the tensor. A machine that does not see rank 0's run directory keeps its ranks' files in its own.

A save writes a hidden folder, fsyncs it and renames it into place; a load checks the manifest first, for no format in
common use notices a flipped byte. Nothing is ever unpickled.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from paw.errors import UserError
from paw.files import cause, fsync, json_object, writing
from paw.model.host import in_parts

VERSION, SHARDED = 1, 2
"""Of a checkpoint whose files hold whole tensors, and of one with a file for each rank."""
PART = 4 << 30
"""Bytes of a file at which the next one begins, so that host memory need not hold more of a model."""
MANIFEST, STATE = "manifest.json", "state.json"
Tensors = dict[str, dict[str, Tensor]]
Named = Iterable[tuple[str, Tensor]]
"""What `named_parameters()` gives."""
Files = dict[str, dict[str, Any]]
"""Size and sha256 by file name."""


class CheckpointError(UserError):
    """A checkpoint that must not be loaded: damaged, incomplete, or of another model. Names the file."""


class ElsewhereError(CheckpointError):
    """All that is there verifies, but another machine's ranks wrote the rest."""


class Draft:
    """A checkpoint that is being written, in a hidden folder until it gets its name.

    On any failure (UserError where the disk refuses) the checkpoints already there stay as they were.
    """

    def __init__(self, folder: Path, step: int, state: Mapping[str, Any], *, version: int = VERSION) -> None:
        """`state` holds JSON values; raises ValueError for a NaN in it."""
        self._text = json.dumps({**state, "version": version, "step": step}, indent=1, allow_nan=False)
        self._folder, self.path = folder, folder / f"step_{step:06d}"
        self._temp = folder / f".tmp_{self.path.name}"

    def begin(self) -> None:
        with self._writing():
            if not self._folder.is_dir():
                self._folder.mkdir(parents=True)
                fsync(self._folder.parent)
            for leftover in self._folder.glob(".tmp_*"):  # of a save that was killed
                _remove(leftover)
            self._temp.mkdir()

    def write(self, tensors: Mapping[str, Mapping[str, Tensor] | Named]) -> Files:
        """Files of tensors, on the disk when it returns. `tensors` as those of `save`."""
        files: Files = {}
        with self._writing():
            for stem, named in tensors.items():
                pairs: Any = named.items() if isinstance(named, Mapping) else named
                for number, part in enumerate(in_parts(pairs, PART), 1):
                    if not part and "." in stem:  # a rank that holds nothing of it
                        continue
                    file = self._temp / f"{stem}{f'-{number}' if number > 1 else ''}.safetensors"
                    save_file(part, file)
                    fsync(file)
                    files[file.name] = digest(file)
        return files

    def publish(self, files: Files) -> None:
        """Add state and manifest, and rename the folder into place."""
        with self._writing():
            (self._temp / STATE).write_text(self._text, encoding="utf-8")
            order = 1 + max((_order(other) for other in self._folder.glob("step_*")), default=0)
            text = manifest_text(files | {STATE: digest(self._temp / STATE)}, order)
            (self._temp / MANIFEST).write_text(text, encoding="utf-8")
            for name in (STATE, MANIFEST):
                fsync(self._temp / name)
        self.reveal()

    def reveal(self) -> None:
        """Rename the folder into place; alone where it holds no more than the files of another machine's ranks."""
        replaced = self._temp.with_name(f".tmp_replaced_{self.path.name}")
        with self._writing():
            fsync(self._temp)
            if self.path.exists():  # a damaged one, or one of a run that was rewound
                self.path.rename(replaced)
            self._temp.rename(self.path)
            fsync(self._folder)
            _remove(replaced)

    def discard(self) -> None:
        shutil.rmtree(self._temp, ignore_errors=True)

    def _writing(self) -> AbstractContextManager[None]:
        some = any(self._folder.glob("step_*"))
        kept = "earlier checkpoints are intact" if some else "there is no earlier one"
        return writing(f"checkpoint {self.path}", f"; {kept}")


def save(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor] | Named], state: Mapping[str, Any]
) -> Path:
    """Write `folder`/step_NNNNNN and return it, see `Draft`.

    `tensors` maps file stem -> name -> tensor, or -> pairs of name and tensor, which are taken one by one; tied weights
    appear once.
    """
    draft = Draft(folder, step, state)
    try:
        draft.begin()
        draft.publish(draft.write(tensors))
    finally:
        draft.discard()
    return draft.path


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the one saved last first, before it those whose manifest cannot be read."""
    return sorted(folder.glob("step_*"), key=lambda path: (_order(path) or math.inf, path.name), reverse=True)


def prune(folder: Path, keep: int) -> list[str]:
    """Remove all but the `keep` (>= 1) checkpoints saved last, whose names it returns. A removal cut short leaves no
    half checkpoint behind."""
    paths = sorted(folder.glob("step_*"), key=lambda path: (_order(path), path.name))
    for path in paths[:-keep]:
        _drop(path)
    return [path.name for path in paths[-keep:]]


def prune_shards(folder: Path, kept: Collection[str]) -> None:
    """Of another machine than rank 0's, remove what is part of none of the checkpoints `kept`."""
    for path in folder.glob("step_*"):
        if path.name not in kept and not (path / MANIFEST).exists():
            _drop(path)


# --- helpers -------------------------------------------------------------------------------------------------------


def _drop(path: Path) -> None:
    aside = path.with_name(f".tmp_pruned_{path.name}")
    path.rename(aside)
    _remove(aside)


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


def manifest_text(files: Files, order: int) -> str:
    """`order` counts the saves of a folder; the last field is the digest of the two before it."""
    body = {"files": files, "order": order}
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": own}, indent=1, sort_keys=True) + "\n"


def read_manifest(path: Path) -> tuple[Files, int]:
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
