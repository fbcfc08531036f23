"""The cache for data that is made once and kept. Each has a folder under $PAW_CACHE."""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paw.io.files import fsync, fsync_tree, writing

LEFTOVER_S = 14 * 86400.0
"""Age at which an unfinished folder is assumed to be left over from a killed process."""


def cache_dir() -> Path:
    """Return $PAW_CACHE, else $XDG_CACHE_HOME/paw, else ~/.cache/paw."""
    if "PAW_CACHE" in os.environ:
        return Path(os.environ["PAW_CACHE"]).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paw"


def stamp(file: Path) -> str:
    """Name a file's current state, by a digest of its path, size and modification time."""
    status = file.stat()
    file_state = f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(file_state.encode()).hexdigest()[:16]


def ensure_cached(name: str, fill: Callable[[Path], object], *, home: Path | None = None) -> Path:
    """Make folder `name` in the cache, or in `home`, unless it exists. Returns its path.

    `fill(folder)` makes its content. The folder is either complete or absent.
    """
    folder = (home or cache_dir()) / name
    if folder.is_dir():
        return folder
    advice = ""
    if home is None:
        advice = "; set PAW_CACHE"
    with writing(folder, advice):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if home is None:
            _remove_leftovers(folder)
        with tempfile.TemporaryDirectory(
            prefix=f"{folder.name}.",
            dir=folder.parent,
            ignore_cleanup_errors=True,  # it may have been renamed
        ) as temporary:
            unfinished = Path(temporary)
            fill(unfinished)
            fsync_tree(unfinished)
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was faster
                    raise
            fsync(folder.parent)
    return folder


def _remove_leftovers(folder: Path) -> None:
    """Remove unfinished folders left by processes that were killed."""
    for leftover in folder.parent.glob(f"{folder.name}.*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > LEFTOVER_S:
                shutil.rmtree(leftover)
