"""A corpus: JSON lines {"id", "contents": "\"Title\"\ntext"}, read from the file one by one.

All lines are checked when the file is first opened. The cache keeps the offsets of the lines, so a
file of 14 GB then opens without delay.
"""

import os
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
from pydantic import Field

from paw.envs.checked import Strict, json_lines
from paw.errors import UserError, to_stderr
from paw.io.cache import ensure_cached, stamp
from paw.io.files import reading

T = TypeVar("T")
LINES_EVERY_S = 10.0
"""Time between two lines of progress if stderr is not a terminal."""


class Document(Strict):
    """One line of the file."""

    id: str | int
    contents: Annotated[str, Field(pattern=r"\S")]


class Corpus:
    """The documents (id, contents) of the JSONL file `path`.

    Raises UserError, which names file and line, if a line is not a document.
    """

    def __init__(self, path: Path):
        self.path = path.expanduser()
        with reading(f"env.corpus = '{path}'"):
            self._file = self.path.open("rb")
            folder = ensure_cached(f"corpus-{stamp(self.path)}", self._index)
        self._starts = np.load(folder / "starts.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, i: int) -> tuple[str, str]:
        line_start = int(self._starts[i])
        line_end = int(self._starts[i + 1])
        line = os.pread(self._file.fileno(), line_end - line_start, line_start)
        document = Document.model_validate_json(line)
        return str(document.id), document.contents

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for _, document in json_lines(self.path, Document, str(self.path)):
            yield str(document.id), document.contents

    def _index(self, folder: Path) -> None:
        """Check all lines, and write the offsets of their starts to `folder`."""
        file_bytes = self.path.stat().st_size
        lines = json_lines(self.path, Document, str(self.path))
        lines = progress(lines, None, f"checking {self.path.name} ({file_bytes >> 20:,} MB)")
        starts = array("q", (offset for offset, _ in lines))
        if not starts:
            raise UserError(f"env.corpus = '{self.path}': it contains no documents")
        starts.append(file_bytes)
        np.save(folder / "starts.npy", np.frombuffer(starts, np.int64))


def progress(items: Iterable[T], total: int | None, label: str) -> Iterator[T]:
    """Yield `items` unchanged, with a progress bar on stderr.

    If stderr is not a terminal, it gets a line now and then instead.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(items, label, total, console=Console(stderr=True), transient=True)
        return
    next_line_at = time.monotonic() + LINES_EVERY_S
    for number, item in enumerate(items):
        yield item
        if time.monotonic() > next_line_at:
            of_total = f" of {total:,}" if total else ""
            to_stderr(f"{label}: {number + 1:,}{of_total}")
            next_line_at = time.monotonic() + LINES_EVERY_S
