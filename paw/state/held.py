"""Whether a run directory is still the one that the run began in, and where it went."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paw.errors import UserError
from paw.files import writing

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class HeldDirectory:
    """A folder that is open: the system knows it by its number, whatever becomes of its name."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def check(self, saved: int) -> None:
        """Raises UserError if the folder was deleted or renamed; `saved` is the update of its newest checkpoint."""
        where = self.where()
        if where == self.path:
            return
        if where is None:
            raise UserError(
                f"the run directory {self.path} was deleted, and what was saved in it: the run has ended"
            )
        kept = (
            f"the checkpoint of update {saved} is in it" if saved else "no checkpoint is in it yet"
        )
        raise UserError(
            f"the run directory {self.path} was renamed to {where}, so the run has ended; {kept}: rename it back, then "
            "--resume auto"
        )

    def where(self) -> Path | None:
        """The folder's name now; None if it has none."""
        if self._is(self.path):
            return self.path
        with suppress(OSError):  # the name that Linux has for it, "... (deleted)" if there is none
            name = Path(f"/proc/self/fd/{self._descriptor}").readlink()
            if self._is(name):
                return name
        return None

    def _is(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(self._descriptor))
        except OSError as error:
            return error.errno not in GONE  # what else is wrong with it, writing to it reports


@contextmanager
def held(path: Path) -> Iterator[HeldDirectory]:
    with writing(f"to run directory {path}"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield HeldDirectory(path, descriptor)
    finally:
        os.close(descriptor)
