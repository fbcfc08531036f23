"""What is made once and kept: a folder each, under $PAW_CACHE."""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paw.files import fsync, fsync_tree, writing

LEFT_S = 14 * 86400.0


def cache_dir() -> Path:
    """$PAW_CACHE, else $XDG_CACHE_HOME/paw, else ~/.cache/paw."""
    if "PAW_CACHE" in os.environ:
        return Path(os.environ["PAW_CACHE"]).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paw"


def stamp(file: Path) -> str:
    """A name for this state of a file: of where it lies, its size and when it was last written."""
    about = file.stat()
    return hashlib.sha256(
        f"{file.resolve()} {about.st_size} {about.st_mtime_ns}".encode()
    ).hexdigest()[:16]


def cached(name: str, fill: Callable[[Path], object], *, home: Path | None = None) -> Path:
    """Folder `name` of the cache, or of `home`, filled by `fill(unfinished folder)` unless it is
    there. Whole or not there at all."""
    folder = (home or cache_dir()) / name
    if folder.is_dir():
        return folder
    with writing(folder, "" if home else "; set PAW_CACHE"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if home is None:
            _sweep(folder)
        beside = {"prefix": f"{folder.name}.", "dir": folder.parent}
        with tempfile.TemporaryDirectory(
            **beside, ignore_cleanup_errors=True
        ) as made:  # by then it may be renamed
            fill(Path(made))
            fsync_tree(Path(made))
            try:
                Path(made).rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
            fsync(folder.parent)
    return folder


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed left of `folder`, once it is older than any of them can be."""
    for left in folder.parent.glob(f"{folder.name}.*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFT_S:
                shutil.rmtree(left)
