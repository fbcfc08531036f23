"""Checkpoints that are complete or absent, hold no code, and detect damage.

    checkpoints/step_000050/
        model.safetensors  optimizer.safetensors  rng.safetensors   tensors, by file stem
        critic_model.safetensors  critic_optimizer.safetensors      with PPO
        state.json                                 step, version, and the caller's counters
        manifest.json                              size and sha256 of each file above

Tensors beyond 4 GiB continue in model-2.safetensors, and so on.

With several ranks, each writes its rows of every tensor to the same folder, as
`model.rank_1.safetensors`. The rows of all ranks in order form the tensor.

A save writes a hidden folder, fsyncs it and renames it into place. A load checks the manifest
first, because no common format detects a flipped byte. Nothing is ever unpickled.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeGuard, cast

from safetensors.torch import save_file
from torch import Tensor

from paw.errors import UserError
from paw.io.files import cause, fsync, json_object, write_file, writing
from paw.model.host import in_parts

VERSION = 1
"""Version of a checkpoint whose files hold full tensors."""
SHARDED = 2
"""Version of a checkpoint with a file for each rank."""
PART = 4 << 30
"""Size in bytes at which a new file begins. Host memory holds at most this much of a model."""
MANIFEST = "manifest.json"
NOTE = ".written_by_rank_"
"""Prefix of the file in a draft that lists what a rank has written. The file holds `Files`."""
CLAIM = ".claimed"
"""Name of a file in a draft. The rank that creates it publishes the draft."""
STATE = "state.json"
Tensors = dict[str, dict[str, Tensor]]
Named = Iterable[tuple[str, Tensor]]
"""The type that `named_parameters()` returns."""
Files = dict[str, dict[str, Any]]
"""Size and sha256 by file name."""


class CheckpointError(UserError):
    """A checkpoint that must not be loaded: damaged, incomplete, or of another model.

    The message names the file.
    """


class Draft:
    """A checkpoint that is being written, in a hidden folder until it gets its name.

    Whatever fails, earlier checkpoints are left unchanged. Raises UserError if the disk refuses.
    """

    def __init__(
        self, folder: Path, step: int, state: Mapping[str, Any], *, version: int = VERSION
    ) -> None:
        """`state` holds JSON values. Raises ValueError if it contains NaN."""
        self._text = json.dumps(
            {**state, "version": version, "step": step}, indent=1, allow_nan=False
        )
        self._folder = folder
        self.path = folder / f"step_{step:06d}"
        self._temporary = folder / f".tmp_{self.path.name}"

    def begin(self) -> None:
        with self._writing():
            if not self._folder.is_dir():
                self._folder.mkdir(parents=True)
                fsync(self._folder.parent)
            for leftover in self._folder.glob(".tmp_*"):  # left over from a save that was killed
                _remove(leftover)
            self._temporary.mkdir()

    def write(self, tensors: Mapping[str, Mapping[str, Tensor] | Named]) -> Files:
        """Write `tensors` (see `save`). The files are on disk when this returns."""
        files: Files = {}
        with self._writing():
            for stem, named_tensors in tensors.items():
                file_parts = in_parts(name_and_tensor(named_tensors), PART)
                for number, part in enumerate(file_parts, 1):
                    if not part and "." in stem:  # a rank without any rows
                        continue
                    name = stem if number == 1 else f"{stem}-{number}"
                    path = self._temporary / f"{name}.safetensors"
                    save_file(part, path)
                    fsync(path)
                    files[path.name] = digest(path)
        return files

    def publish(self, files: Files) -> None:
        """Add the state and manifest, and rename the folder into place."""
        with self._writing():
            (self._temporary / STATE).write_text(self._text, encoding="utf-8")
            last_order = max((_order(path) for path in self._folder.glob("step_*")), default=0)
            text = manifest_text(files | {STATE: digest(self._temporary / STATE)}, last_order + 1)
            (self._temporary / MANIFEST).write_text(text, encoding="utf-8")
            for name in (STATE, MANIFEST):
                fsync(self._temporary / name)
            for helper in (*self._temporary.glob(f"{NOTE}*"), self._temporary / CLAIM):
                helper.unlink(missing_ok=True)

            replaced = self._temporary.with_name(f".tmp_replaced_{self.path.name}")
            fsync(self._temporary)
            if self.path.exists():  # damaged, or saved before the run was rewound
                self.path.rename(replaced)
            self._temporary.rename(self.path)
            fsync(self._folder)
            _remove(replaced)

    def note(self, rank: int, files: Files) -> None:
        """Note in the draft that a rank has written these files."""
        with self._writing():
            write_file(self._temporary / f"{NOTE}{rank}", json.dumps(files))

    def noted(self, world_size: int) -> list[Files] | None:
        """Return the files that each rank has written, or None while any rank's note is missing."""
        notes: list[Files] = []
        for rank in range(world_size):
            try:
                files = json_object((self._temporary / f"{NOTE}{rank}").read_bytes())
            except OSError:
                return None
            if not _is_file_table(files):
                return None
            notes.append(files)
        return notes

    def claim(self) -> bool:
        """Whether this process is the first to claim the draft for publishing."""
        try:
            with self._writing():
                (self._temporary / CLAIM).touch(exist_ok=False)
        except UserError:
            return False
        return True

    @property
    def is_published(self) -> bool:
        return self.path.is_dir() and not self._temporary.exists()

    def discard(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _writing(self) -> AbstractContextManager[None]:
        advice = "there is no earlier checkpoint"
        if any(self._folder.glob("step_*")):
            advice = "earlier checkpoints are intact"
        return writing(f"checkpoint {self.path}", f"; {advice}")


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor] | Named],
    state: Mapping[str, Any],
) -> Path:
    """Write the checkpoint `folder`/step_NNNNNN and return its path; see `Draft`.

    `tensors` maps a file stem to {name: tensor}, or to pairs (name, tensor) that are read one by
    one. Tied weights appear once.
    """
    draft = Draft(folder, step, state)
    try:
        draft.begin()
        draft.publish(draft.write(tensors))
    finally:
        draft.discard()
    return draft.path


def saved(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, newest save first.

    Checkpoints whose manifest cannot be read come before all others.
    """
    return sorted(
        folder.glob("step_*"), key=lambda path: (_order(path) or math.inf, path.name), reverse=True
    )


def prune(folder: Path, keep: int) -> None:
    """Remove all but the last `keep` (>= 1) saved checkpoints.

    An interrupted removal does not leave half a checkpoint behind.
    """
    oldest_first = sorted(folder.glob("step_*"), key=lambda path: (_order(path), path.name))
    for path in oldest_first[:-keep]:
        renamed = path.with_name(f".tmp_pruned_{path.name}")
        path.rename(renamed)
        _remove(renamed)


def name_and_tensor(tensors: Mapping[str, Tensor] | Named) -> Named:
    """Return the pairs (name, tensor) of a mapping. An iterable of pairs is returned unchanged."""
    if isinstance(tensors, Mapping):
        return cast(Mapping[str, Tensor], tensors).items()
    return tensors


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def digest(file: Path) -> dict[str, Any]:
    """Return the size and sha256 of a file, as in the manifest. Raises OSError."""
    if not file.is_file():  # reading a pipe would wait for its writer
        raise OSError("not a file")
    with file.open("rb") as stream:
        return {
            "bytes": file.stat().st_size,
            "sha256": hashlib.file_digest(stream, "sha256").hexdigest(),
        }


def manifest_text(files: Files, order: int) -> str:
    """Return the text of manifest.json: `files`, `order`, and the digest of both.

    `order` is the number of this save in its folder.
    """
    content = {"files": files, "order": order}
    content_digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": content_digest}, indent=1, sort_keys=True) + "\n"


def read_manifest(path: Path) -> tuple[Files, int]:
    """Return (files, order) of the checkpoint at `path`.

    Raises CheckpointError if its manifest is missing or damaged.
    """
    file = path / MANIFEST
    try:
        if file.exists() and not file.is_file():
            raise OSError("not a file")
        text = file.read_bytes()
    except OSError as error:
        raise damaged(path, MANIFEST, cause(error)) from None
    content = json_object(text) or {}
    files = content.get("files")
    order = content.get("order")
    if not _is_file_table(files) or type(order) is not int or not 0 < order < 2**53:
        raise damaged(path, MANIFEST, "not a manifest")
    if text != manifest_text(files, order).encode():
        raise damaged(path, MANIFEST, "it does not match its own sha256")
    return files, order


def _is_file_table(value: Any) -> TypeGuard[Files]:
    if not isinstance(value, dict):
        return False
    return all(
        isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"} for entry in value.values()
    )


def _order(path: Path) -> int:
    """Return the number of this save in its folder, from 1; 0 if the manifest is unreadable."""
    try:
        return read_manifest(path)[1]
    except CheckpointError:
        return 0


def rng_name(rank: int) -> str:
    """Return the file stem of a rank's random state, which is also its key in state.json."""
    if rank == 0:
        return "rng"
    return f"rng_{rank}"


def damaged(path: Path, name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} is damaged ({name}): {reason}")
