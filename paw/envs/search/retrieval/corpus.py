"""A corpus: JSON lines {"id", "contents": "\"Title\"\ntext"}, read where they lie.

Lines are checked when the file is first seen; where they start is kept in the cache, so that 14 GB
open at once.
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

from paw.cache import cached, stamp
from paw.envs.checked import Strict, json_lines
from paw.errors import UserError, to_stderr
from paw.files import reading

T = TypeVar("T")
LINES_EVERY_S = 10.0
"""Between two lines of progress where there is no terminal."""


class Document(Strict):
    id: str | int
    contents: Annotated[str, Field(pattern=r"\S")]


class Corpus:
    """The documents (id, contents) of the JSONL file `path`.

    UserError, with file and line, for what is no document.
    """

    def __init__(self, path: Path):
        self.path = path.expanduser()
        with reading(f"env.corpus = '{path}'"):
            self._file = self.path.open("rb")
            folder = cached(f"corpus-{stamp(self.path)}", self._index)
        self._starts = np.load(folder / "starts.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, at: int) -> tuple[str, str]:
        start, end = map(int, self._starts[at : at + 2])
        found = Document.model_validate_json(os.pread(self._file.fileno(), end - start, start))
        return str(found.id), found.contents

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return (
            (str(found.id), found.contents)
            for _, found in json_lines(self.path, Document, str(self.path))
        )

    def _index(self, folder: Path) -> None:
        size = self.path.stat().st_size
        lines = progress(
            json_lines(self.path, Document, str(self.path)),
            None,
            f"checking {self.path.name} ({size >> 20:,} MB)",
        )
        starts = array("q", (offset for offset, _ in lines))
        if not starts:
            raise UserError(f"env.corpus = '{self.path}': there is no document in it")
        starts.append(size)
        np.save(folder / "starts.npy", np.frombuffer(starts, np.int64))


def progress(items: Iterable[T], total: int | None, what: str) -> Iterator[T]:
    """`items` as they come, with a progress bar on stderr; lines now and then where that is no terminal."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(items, what, total, console=Console(stderr=True), transient=True)
        return
    due = time.monotonic() + LINES_EVERY_S
    for number, item in enumerate(items):
        yield item
        if time.monotonic() > due:
            to_stderr(f"{what}: {number + 1:,}" + (f" of {total:,}" if total else ""))
            due = time.monotonic() + LINES_EVERY_S
