"""A run directory is one process's, from before anything is made in it until that process ends, by kill -9 too."""

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

from paw.config import Config
from paw.errors import UserError, clean
from paw.files import cause, fsync

LOCK = ".lock"
"""Holds the id of the process that has the folder, or had it last; what counts is the kernel's lock on the file."""
WAIT_S = 0.5
"""For another process that only looks whether the folder is taken, or has not written its id yet."""


class InUseError(UserError):
    """The folder is another living process's."""


def lock(folder: Path) -> IO[str]:
    """Take `folder`, which exists, until the file that is returned closes or this process ends.

    Raises InUseError with the id of the process that has it, and UserError where no file can be made there. On a file
    system that knows no locks nothing is held.
    """
    path = folder / LOCK
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {cause(error)}") from None
    give_up = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < give_up:
                time.sleep(0.02)
                continue
            file.close()
            raise InUseError(f"{folder} is in use by process {_written(path)}; wait for it or stop it") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise UserError(f"cannot lock {path}: {cause(error)}") from None
            break
    with suppress(OSError):  # a full disk: the lock holds all the same
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    os.register_at_fork(after_in_child=file.close)  # a child that outlives this process must not hold the folder
    return file


def holder(folder: Path) -> str | None:
    """The id of the process that has `folder`, None where nobody has."""
    path = folder / LOCK
    if not path.is_file():
        return None
    with suppress(OSError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _written(path)
    return None


def _written(path: Path) -> str:
    text = path.read_text(errors="replace").strip()
    return text if text.isdecimal() else "?"


def claim(config: Config, *, resume: bool, numbered: bool) -> tuple[str, IO[str]]:
    """Make and lock the directory of a new run, or lock that of the run to resume; (its name, the lock).

    `numbered` takes the name as a stem: a new run gets NAME, NAME-2, ..., the first beyond those that are there, and
    `resume` means the highest. Raises UserError where the directory holds another run, is in use, or none to resume.
    """
    for name in run_names(config, resume=resume) if numbered else [config.run.name]:
        directory = config.run.dir / name
        try:
            if not resume:
                directory.mkdir(parents=True, exist_ok=True)
                fsync(directory.parent)
            elif not (directory / "metrics.jsonl").is_file():
                raise UserError(f"--resume: there is no run in {directory}; start without --resume")
            held = lock(directory)
        except InUseError:
            if resume or not numbered:
                raise
            continue
        except (OSError, ValueError) as error:
            why = cause(error)
            raise UserError(f"cannot create the run directory {directory}: {why}; set --run.dir") from None
        if resume or not _begun(directory):
            for leftover in directory.glob(".tmp_*_*"):  # of a file that a kill kept from being renamed
                with suppress(OSError):
                    leftover.unlink()
            return name, held
        held.close()
        if not numbered:
            raise UserError(f"{directory} holds a run already; use --resume auto, or another --run.name")
    raise AssertionError("numbers do not end")


def check_claim(config: Config, *, resume: str, numbered: bool) -> None:
    """Raise what `claim` would, but for other processes' locks, and for a checkpoint to resume that is not there."""
    name = next(run_names(config, resume=True)) if numbered else config.run.name
    directory = config.run.dir / name
    if not resume and not numbered and _begun(directory):
        raise UserError(f"{directory} holds a run already; use --resume auto, or another --run.name")
    if resume not in ("", "auto") and not re.fullmatch(r"step_\d+", resume):
        raise UserError(f"--resume {clean(resume)}: takes auto or a checkpoint's name, such as step_000100")
    if resume and not (directory / "metrics.jsonl").is_file():
        raise UserError(f"--resume: there is no run in {directory}; start without --resume")
    there = sorted(path.name for path in (directory / "checkpoints").glob("step_*"))
    if resume not in ("", "auto", *there):
        found = f"there are: {', '.join(there)}" if there else "there is none"
        raise UserError(f"--resume {resume}: no such checkpoint in {directory / 'checkpoints'}; {found}")


def run_names(config: Config, *, resume: bool) -> Iterator[str]:
    """Names a run may take whose stem is run.name: of a new one without end, of one to resume the highest there is."""
    pattern = re.compile(rf"{re.escape(config.run.name)}(?:-(\d+))?")
    found = (pattern.fullmatch(path.parent.name) for path in config.run.dir.glob("*/metrics.jsonl"))
    taken = max((int(match[1] or 1) for match in found if match), default=0)
    for number in [max(taken, 1)] if resume else count(taken + 1):
        yield config.run.name if number == 1 else f"{config.run.name}-{number}"


def _begun(directory: Path) -> bool:
    """Whether there is a run: an empty log is one that stopped before it had begun."""
    metrics = directory / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0
