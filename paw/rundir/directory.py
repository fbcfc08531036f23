"""Checks that the run directory is still the one the run started in, or finds where it is now."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paw.errors import UserError
from paw.io.files import writing

MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors for a path that does not exist."""


class OpenDirectory:
    """An open folder. The system finds it by its descriptor even after it is renamed."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def check(self, saved: int) -> None:
        """Raise UserError if the folder was deleted or renamed.

        `saved` is the update of its newest checkpoint, for the error message.
        """
        path = self.where()
        if path == self.path:
            return
        if path is None:
            raise UserError(
                f"the run directory {self.path} was deleted with everything saved in it: "
                "the run has ended"
            )
        content = "it has no checkpoint yet"
        if saved:
            content = f"it has the checkpoint of update {saved}"
        raise UserError(
            f"the run directory {self.path} was renamed to {path}, so the run has ended; "
            f"{content}: rename it back, then --resume auto"
        )

    def where(self) -> Path | None:
        """Return the folder's current path; None if it was deleted."""
        if self._is(self.path):
            return self.path
        with suppress(OSError):  # Linux has its path here, with " (deleted)" appended if it is gone
            path = Path(f"/proc/self/fd/{self._descriptor}").readlink()
            if self._is(path):
                return path
        return None

    def _is(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(self._descriptor))
        except OSError as error:
            # The next write to the folder reports any other problem.
            return error.errno not in MISSING


@contextmanager
def open_directory(path: Path) -> Iterator[OpenDirectory]:
    """Open a folder for the block. Raises UserError if it cannot be opened."""
    with writing(f"to run directory {path}"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield OpenDirectory(path, descriptor)
    finally:
        os.close(descriptor)
