"""Files that are complete or absent. Each is written to another file, fsynced and renamed.

Imports no torch.
"""

import errno
import io
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from paw.errors import UserError

HINTS = {
    errno.ENOSPC: ": free some space",
    errno.EDQUOT: ": free some space, because the quota is used up",
    errno.EROFS: ": choose a writable folder",
}


@contextmanager
def writing(subject: object, advice: str = "") -> Iterator[None]:
    """Raise UserError if the disk refuses: "cannot write SUBJECT", the cause, and `advice`."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # a file size limit too: Python ignores SIGXFSZ
        raise UserError(f"cannot write {subject}: {cause(error)}{advice}") from None


@contextmanager
def reading(subject: object, advice: str = "") -> Iterator[None]:
    """Raise UserError if reading fails: "SUBJECT: cannot be read", the cause, and `advice`."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{subject}: cannot be read: {cause(error)}{advice}") from None


def write_file(path: Path, content: str | bytes | Callable[[BinaryIO], object]) -> None:
    """Replace a file with `content`. After any failure, even power loss, the old file is intact.

    Text is written as UTF-8. A function, such as `figure.savefig`, gets the open file. Devices and
    pipes cannot be replaced, so they are written to directly. Raises OSError.
    """

    def fill(file: Any) -> None:
        if callable(content):
            content(file)
        elif isinstance(content, str):
            file.write(content.encode())
        else:
            file.write(content)

    if path.exists() and not path.is_file() and not path.is_dir():
        with io.BufferedWriter(io.FileIO(path, "w", opener=_open)) as file:
            fill(file)
        return
    path = Path(os.path.realpath(path))  # a link is kept, and its target is replaced
    temporary = path.with_name(f".tmp_{os.getpid()}_{path.name}")
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def open_append(path: Path) -> io.FileIO:
    """Open a file for appending. It has no buffer, so a failed write is not repeated later."""
    return io.FileIO(path, "a", opener=_open)


def _open(path: str, flags: int) -> int:
    """Open a file, but fail for a pipe without a reader instead of waiting for one."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def fsync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """`fsync` everything in a folder, then the folder itself."""
    for path in sorted(folder.rglob("*"), reverse=True):
        fsync(path)
    fsync(folder)


def raise_file_limit(files: int) -> int:
    """Let this process open `files` files if it may. Returns how many it may open now.

    A connection counts as a file, and many systems begin with 1,024.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_files = _finite(soft_limit)
    if max_files < files:
        max_files = min(_finite(hard_limit), files)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, hard_limit))
    return max_files


def _finite(limit: int) -> int:
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return limit


def text_of(path: Path) -> str:
    """Return the text of a file, or "" if it is missing or not a regular file.

    A pipe is not read, because that would wait for its writer.
    """
    with suppress(OSError):
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace")
    return ""


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in `text`, or None if it holds anything else, however malformed."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return None


def update_of(record: dict[str, Any] | None) -> int | None:
    """Return the update of a line of metrics.jsonl or samples.jsonl, or None if it has none."""
    if not record:
        return None
    step = record.get("step")
    if type(step) is int and 0 <= step < 2**31:
        return step
    return None


def cause(error: Exception) -> str:
    """Return why the operating system refused, without the path, and what would help."""
    number = getattr(error, "errno", None)
    if number is None:
        match = re.search(r"os error (\d+)", str(error))  # safetensors reports "... (os error 28)"
        if match:
            number = int(match[1])
    if not number:
        return str(error).partition("\n")[0]
    return os.strerror(number) + HINTS.get(number, "")
