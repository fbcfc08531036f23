"""The lock of a run directory, which belongs to one process until that process ends.

It is taken before anything is created in the directory. The kernel holds it, so even kill -9 frees
it.
"""

import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO

from paw.config.sections import Config
from paw.errors import UserError, clean
from paw.io.files import cause, fsync, writing

LOCK = ".lock"
"""Name of the file with the id of the process that has or last had the folder. Only the kernel's
lock on the file counts."""
WAIT_S = 2.0
"""Seconds to wait for a process that has not written its id yet, or that was just killed together
with its watching parent."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system without locks."""


class InUseError(UserError):
    """The folder belongs to another run or another living process."""


def lock(folder: Path) -> IO[str]:
    """Lock an existing folder until the returned file is closed or this process ends.

    On a file system without locks nothing is locked. Raises InUseError, with the id of the other
    process, if the folder is in use.
    """
    path = folder / LOCK
    deadline = time.monotonic() + WAIT_S
    with writing(folder):
        file = path.open("a+", encoding="utf-8")
    while not _try_lock(file):
        if time.monotonic() > deadline:
            file.close()
            raise InUseError(
                f"{folder} is in use by process {_process_id(path)}; wait for it or stop it"
            )
        time.sleep(0.02)
    with suppress(OSError):  # the lock holds even if the disk is full
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    # A child that outlives this process must not keep the folder locked.
    os.register_at_fork(after_in_child=file.close)
    return file


def _try_lock(file: IO[str]) -> bool:
    """Try to lock the file. Returns False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise UserError(f"cannot lock {file.name}: {cause(error)}") from None
    return True


def _process_id(path: Path) -> str:
    text = path.read_text(errors="replace").strip()
    if not text.isdecimal():
        return "?"
    return text


def take_run_directory(config: Config, *, resume: str, numbered: bool) -> tuple[str, IO[str]]:
    """Make and lock the directory of a new run, or lock the directory of the run to resume.

    Returns the name of the run and the lock. Closing the lock releases it. Raises UserError if the
    directory holds another run, is in use, or has no run to resume.
    """
    for name in run_names(config, resume=resume, numbered=numbered):
        directory = config.run.dir / name
        try:
            if not resume:
                directory.mkdir(parents=True, exist_ok=True)
                fsync(directory.parent)
            check_free(directory, resume=resume)
            lock_file = lock(directory)
        except InUseError:
            if resume or not numbered:
                raise
            continue  # try the next number
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot create the run directory {directory}: {cause(error)}; set --run.dir"
            ) from None
        _remove_leftovers(directory)
        return name, lock_file
    raise AssertionError("run_names has no end for new runs")


def _remove_leftovers(directory: Path) -> None:
    """Remove files that were not renamed into place because the process was killed."""
    for leftover in directory.glob(".tmp_*_*"):
        with suppress(OSError):
            leftover.unlink()


def run_names(config: Config, *, resume: str, numbered: bool) -> Iterator[str]:
    """Yield the names that a run may take.

    Without `numbered`, this is only run.name. With it, run.name is a stem: a new run takes the next
    free number, and a resumed run takes the highest existing number.
    """
    stem = config.run.name
    if not numbered:
        yield stem
        return
    highest = _highest_number(config.run.dir, stem)
    if resume:
        yield _numbered(stem, max(highest, 1))
        return
    for number in count(highest + 1):
        yield _numbered(stem, number)


def _numbered(stem: str, number: int) -> str:
    """Return the name of the run with that number: STEM for 1, STEM-2, ..."""
    if number == 1:
        return stem
    return f"{stem}-{number}"


def _highest_number(folder: Path, stem: str) -> int:
    """Return the highest number of the runs STEM (1), STEM-2, ... in a folder, or 0."""
    highest = 0
    for path in folder.glob("*/metrics.jsonl"):
        match = re.fullmatch(rf"{re.escape(stem)}(?:-(\d+))?", path.parent.name)
        if match:
            highest = max(highest, int(match[1] or 1))
    return highest


def check_free(directory: Path, *, resume: str) -> None:
    """Raise UserError if a directory holds another run, or no run to resume."""
    metrics = directory / "metrics.jsonl"
    checkpoints = directory / "checkpoints"
    if not resume:
        # If a run was stopped before its first update, its log is empty.
        has_log = metrics.exists() and metrics.stat().st_size > 0
        if has_log or any(checkpoints.glob("step_*")):
            raise InUseError(
                f"{directory} already holds a run; use --resume auto, or set another --run.name"
            )
        return

    if resume != "auto" and not re.fullmatch(r"step_\d+", resume):
        raise UserError(
            f"--resume {clean(resume)}: use auto or a checkpoint's name, such as step_000100"
        )
    if not metrics.is_file():
        raise UserError(f"--resume: there is no run in {directory}; start without --resume")
    names = sorted(path.name for path in checkpoints.glob("step_*"))
    if resume not in ("auto", *names):
        available = "there are none"
        if names:
            available = f"available: {', '.join(names)}"
        raise UserError(f"--resume {resume}: no such checkpoint in {checkpoints}; {available}")
