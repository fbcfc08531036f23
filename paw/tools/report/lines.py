"""Reads a file of lines as far as it has been written, and later only what was appended."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

LINE_BYTES = 32 << 20
"""Maximum length of a line. A file is read up to a longer one, which no run writes."""


@dataclass
class LineFile:
    """A file of lines that grows, and may be replaced or cut off when its run is resumed."""

    path: Path
    offset: int = 0
    """The end of what was read."""
    identity: tuple[int, int] = (0, 0)
    """Device and number of the file that was read."""
    last_line: bytes = b""
    """The line before the offset. If it is no longer there, the file was rewritten."""
    incomplete_line: bytes = b""
    """What follows: a line that is being written, or that a crash has cut off."""

    def read_new(self) -> tuple[bool, list[tuple[int, bytes]]]:
        """Return (whether earlier lines may have changed, [(offset, line)] of new complete lines).

        If they may have changed, the lines are those of the whole file. A missing file is empty,
        and so is a pipe, which would make the reader wait.
        """
        try:
            if not self.path.is_file():
                raise FileNotFoundError(self.path)
            file = self.path.open("rb")
        except OSError:
            was_read = self.offset > 0
            self._start_over((0, 0))
            return was_read, []
        with file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            changed = self.offset > 0 and not self._continues(file, identity, status.st_size)
            if changed or self.offset == 0:
                self._start_over(identity)
            file.seek(self.offset)
            lines: list[tuple[int, bytes]] = []
            while True:
                line = file.readline(LINE_BYTES)
                if not line.endswith(b"\n"):
                    self.incomplete_line = line.strip()
                    break
                lines.append((self.offset, line))
                self.offset += len(line)
                self.last_line = line
        return changed, lines

    def _continues(self, file: BinaryIO, identity: tuple[int, int], size: int) -> bool:
        if identity != self.identity or size < self.offset:
            return False
        file.seek(self.offset - len(self.last_line))
        return file.read(len(self.last_line)) == self.last_line

    def _start_over(self, identity: tuple[int, int]) -> None:
        self.offset = 0
        self.identity = identity
        self.last_line = b""
        self.incomplete_line = b""
