"""A corpus: JSON lines {"id", "contents": "\"Title\"\ntext"}, read where they lie.

Every line is checked once, when the file is first seen; where lines start is then kept in the cache, memory-mapped, so
that the 14 GB of Wikipedia open at once and take no memory.
"""

import json
import os
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, overload

import numpy as np

from paw.cache import cached, stamp
from paw.errors import UserError, to_stderr

T = TypeVar("T")
LINES_EVERY_S = 10.0
"""Between two lines of progress where there is no terminal."""


class Corpus(Sequence[tuple[str, str]]):
    """The documents (id, contents) of the JSONL file `path`. UserError, with file and line, for what is no document."""

    def __init__(self, path: Path):
        self.path = path.expanduser()
        try:
            self._file = self.path.open("rb")
            folder = cached(f"corpus-{stamp(self.path)}", self._index)
        except OSError as error:
            raise UserError(f"env.corpus = '{path}': cannot be read ({error.strerror})") from None
        self._starts = np.load(folder / "starts.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, at: int) -> tuple[str, str]: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[str, str]]: ...
    def __getitem__(self, at: int | slice) -> tuple[str, str] | Sequence[tuple[str, str]]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        start, end = self._starts[at % len(self)], self._starts[at % len(self) + 1]
        return _parse(os.pread(self._file.fileno(), int(end - start), int(start)))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        with self.path.open("rb") as file:
            yield from (_parse(line) for line in file if not line.isspace())

    def _index(self, folder: Path) -> None:
        starts, offset = array("q"), 0
        size = max(self.path.stat().st_size >> 20, 1)
        with self.path.open("rb") as file:
            seen = progress(file, None, f"checking {self.path.name} ({size:,} MB)")
            for number, line in enumerate(seen, 1):
                if not line.isspace():
                    try:
                        _parse(line)
                    except ValueError as error:
                        cut = "" if line.endswith(b"\n") else " (the last line: is the file cut off?)"
                        raise UserError(f"{self.path}, line {number}: {error}{cut}") from None
                    starts.append(offset)
                offset += len(line)
        if not starts:
            raise UserError(f"env.corpus = '{self.path}': there is no document in it")
        starts.append(offset)
        np.save(folder / "starts.npy", np.frombuffer(starts, np.int64))


def _parse(line: bytes) -> tuple[str, str]:
    """(id, contents) of one line. ValueError that says what is wrong with it."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
        raise ValueError("not JSON") from None
    if not isinstance(document, dict):
        raise ValueError('not an object {"id", "contents"}')
    name, contents = document.get("id"), document.get("contents")
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise ValueError('"id" is missing, or neither text nor a whole number')
    if not isinstance(contents, str) or not contents.strip():
        raise ValueError('"contents" is missing, empty or not text')
    try:
        contents.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise ValueError("not Unicode") from None
    return str(name), contents


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
