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
from paw.files import cause, fsync, writing

LOCK = ".lock"
"""Holds the id of the process that has the folder, or had it last; what counts is the kernel's lock on the file."""
WAIT_S = 2.0
"""For another process that only looks whether the folder is taken, has not written its id yet, or
was killed with the parent that watches it a moment ago."""


class InUseError(UserError):
    """The folder is another run's, or another living process's."""


def lock(folder: Path) -> IO[str]:
    """Take `folder`, which exists, until the file that is returned closes or this process ends.

    Raises InUseError with the id of the process that has it. On a file system that knows no locks
    nothing is held.
    """
    path, give_up = folder / LOCK, time.monotonic() + WAIT_S
    with writing(folder):
        file = path.open("a+", encoding="utf-8")
    while not _locked(file, fcntl.LOCK_EX):
        if time.monotonic() > give_up:
            file.close()
            raise InUseError(
                f"{folder} is in use by process {_written(path)}; wait for it or stop it"
            )
        time.sleep(0.02)
    with suppress(OSError):  # a full disk: the lock holds all the same
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    os.register_at_fork(
        after_in_child=file.close
    )  # a child that outlives this process must not hold the folder
    return file


def holder(folder: Path) -> str | None:
    """The id of the process that has `folder`, None where nobody has."""
    path = folder / LOCK
    if path.is_file():
        with suppress(OSError), path.open() as file:
            return None if _locked(file, fcntl.LOCK_SH) else _written(path)
    return None


def _locked(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise UserError(f"cannot lock {file.name}: {cause(error)}") from None
    return True


def _written(path: Path) -> str:
    text = path.read_text(errors="replace").strip()
    return text if text.isdecimal() else "?"


def claim(config: Config, *, resume: str, numbered: bool) -> tuple[str, IO[str]]:
    """Make and lock the directory of a new run, or lock that of the run to resume; (its name, the lock).

    Raises UserError where the directory holds another run, is in use, or has none to resume.
    """
    for name in run_names(config, resume=resume, numbered=numbered):
        directory = config.run.dir / name
        try:
            if not resume:
                directory.mkdir(parents=True, exist_ok=True)
                fsync(directory.parent)
            check_free(directory, resume=resume)
            held = lock(directory)
        except InUseError:
            if resume or not numbered:
                raise
            continue
        except (OSError, ValueError) as error:
            why = cause(error)
            raise UserError(
                f"cannot create the run directory {directory}: {why}; set --run.dir"
            ) from None
        for leftover in directory.glob(".tmp_*_*"):  # of a file that a kill kept from being renamed
            with suppress(OSError):
                leftover.unlink()
        return name, held
    raise AssertionError("numbers do not end")


def run_names(config: Config, *, resume: str, numbered: bool) -> Iterator[str]:
    """Names a run may take: run.name, or with `numbered` those whose stem it is, of a new run
    without end, of one to resume the highest there is."""
    stem = config.run.name
    found = (
        re.fullmatch(rf"{re.escape(stem)}(?:-(\d+))?", path.parent.name)
        for path in config.run.dir.glob("*/metrics.jsonl")
    )
    taken = max((int(match[1] or 1) for match in found if match), default=0) if numbered else 0
    for number in [max(taken, 1)] if resume or not numbered else count(taken + 1):
        yield stem if number == 1 else f"{stem}-{number}"


def check_free(directory: Path, *, resume: str) -> None:
    """Raise UserError for a run directory that cannot be taken, whoever else has it: it holds
    another run, or none to resume."""
    metrics, checkpoints = directory / "metrics.jsonl", directory / "checkpoints"
    if not resume:
        # An empty log is of one that stopped before it had begun; checkpoints alone are those of
        # another machine's run.
        if (metrics.exists() and metrics.stat().st_size > 0) or any(checkpoints.glob("step_*")):
            raise InUseError(
                f"{directory} holds a run already; use --resume auto, or another --run.name"
            )
        return
    if resume != "auto" and not re.fullmatch(r"step_\d+", resume):
        raise UserError(
            f"--resume {clean(resume)}: takes auto or a checkpoint's name, such as step_000100"
        )
    if not metrics.is_file():
        raise UserError(f"--resume: there is no run in {directory}; start without --resume")
    there = sorted(path.name for path in checkpoints.glob("step_*"))
    if resume not in ("auto", *there):
        found = f"there are: {', '.join(there)}" if there else "there is none"
        raise UserError(f"--resume {resume}: no such checkpoint in {checkpoints}; {found}")
