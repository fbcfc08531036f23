"""Files that are whole or not there: written aside, fsynced, renamed into place. No torch."""

import errno
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from paw.errors import UserError

HINTS = {
    errno.ENOSPC: ": free some space",
    errno.EDQUOT: ": free some space, the quota is used up",
    errno.EROFS: ": choose a writable folder",
}


@contextmanager
def writing(what: object, advice: str = "") -> Iterator[None]:
    """A disk that refuses is one line: UserError "cannot write WHAT", the cause, and `advice`."""
    try:
        yield
    except (
        OSError,
        SafetensorError,
    ) as error:  # Python ignores SIGXFSZ: a file size limit is an OSError too
        raise UserError(f"cannot write {what}: {cause(error)}{advice}") from None


@contextmanager
def reading(what: object, advice: str = "") -> Iterator[None]:
    """A file that cannot be read is one line: UserError "WHAT: cannot be read", the cause, and `advice`."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what}: cannot be read: {cause(error)}{advice}") from None


def write_file(path: Path, content: str | bytes | Callable[[BinaryIO], object]) -> None:
    """Make `content` what `path` holds: all of it, or on any failure, power loss included, what was there before.

    Text is written as UTF-8; a function, such as `figure.savefig`, gets the open file. A device or
    a pipe, which cannot be replaced, is written to directly. Raises OSError.
    """
    data = content.encode() if isinstance(content, str) else content
    fill: Any = data if callable(data) else lambda file: file.write(data)
    if path.exists() and not path.is_file() and not path.is_dir():
        with io.BufferedWriter(io.FileIO(path, "w", opener=_open)) as file:
            fill(file)
        return
    path = Path(os.path.realpath(path))  # a link stays one
    temp = path.with_name(f".tmp_{os.getpid()}_{path.name}")
    try:
        with temp.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
        fsync(path.parent)
    finally:
        with suppress(OSError):
            temp.unlink(missing_ok=True)


def open_append(path: Path) -> io.FileIO:
    """`path` to append to, without a buffer: what could not be written is not tried again."""
    return io.FileIO(path, "a", opener=_open)


def _open(path: str, flags: int) -> int:
    """A pipe without a reader is an error, not a wait."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def fsync(path: Path) -> None:
    """What `path` holds is on the disk: the bytes of a file, the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """`fsync` of everything in a folder, and of the folder itself last."""
    for path in sorted(folder.rglob("*"), reverse=True):
        fsync(path)
    fsync(folder)


def text_of(path: Path) -> str:
    """What a file holds as text; nothing where it is missing, or no file: a pipe would wait for its writer."""
    with suppress(OSError):
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace")
    return ""


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that `text` is; None where it is anything else, however malformed."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else None


def update_of(record: dict[str, Any] | None) -> int | None:
    """The update that a line of metrics.jsonl or samples.jsonl is of; None where it is no update's."""
    step = record.get("step") if record else None
    return step if type(step) is int and 0 <= step < 2**31 else None


def cause(error: Exception) -> str:
    """Why the operating system refused, without the path, and what helps; of safetensors' errors too."""
    number = getattr(error, "errno", None)
    if number is None:  # safetensors reports "... (os error 28)"
        match = re.search(r"os error (\d+)", str(error))
        number = int(match[1]) if match else None
    return os.strerror(number) + HINTS.get(number, "") if number else str(error).partition("\n")[0]
