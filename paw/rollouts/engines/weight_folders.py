"""Folders in which weights travel to servers, by default in memory. The name of each says whose it
is, so those of a run that was killed are removed: at the start of any run, and by the watcher of
the run's servers. No torch.

    paw-weights-BOOT-NAMESPACE-PID-START-RANDOM

A number of a process is given anew once the process has ended: only with the time of its start does
it name one. It holds within one boot of one machine and one namespace (containers may share
/dev/shm, and number their processes apart). A folder of another boot, namespace or user is left
alone.
"""

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "paw-weights-"
NAME = re.compile(rf"{PREFIX}([0-9a-f]+-[0-9]+)-([0-9]{{1,9}})-([0-9]+)-\w+")
"""Its groups: the machine, the number of the process, when that started."""
STATE, START = 0, 19
"""Fields of /proc/PID/stat after the command, see proc_pid_stat(5)."""
DEAD = ("Z", "X", "x")
"""States of a process that runs no more: its parent has not yet asked how it ended."""


def make_weight_folder(parent: Path | None = None) -> Path:
    """A new folder of this process, in `parent` or in memory."""
    pid = os.getpid()
    owner = ""
    with suppress(OSError):  # of a system without /proc: nobody removes it but this process
        owner = f"{_machine()}-{pid}-{started_at(pid)}-"
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner}", dir=parent or default_parent()))


def default_parent() -> Path:
    return MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())


def started_at(pid: int) -> str:
    """When a process started, in clock ticks since the boot; "" if it runs no more. Raises OSError
    if there is none, or it cannot be known."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    fields = text.rpartition(") ")[2].split()
    return "" if fields[STATE] in DEAD else fields[START]


def is_running(pid: int, started: str) -> bool:
    """Whether the process `pid` that started then still runs; True if that cannot be known."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # there is one, of another user
    try:
        return started_at(pid) == started
    except OSError:
        return True


def remove_abandoned(parents: Iterable[Path | None]) -> list[str]:
    """Remove this user's folders of processes that have ended from `parents` (None: the default
    one). Returns a line about each."""
    lines = []
    try:
        machine = _machine()
    except OSError:
        return lines
    for parent in {parent or default_parent() for parent in parents}:
        for path in _folders(parent):
            match = NAME.fullmatch(path.name)
            if match and match[1] == machine and not is_running(int(match[2]), match[3]):
                size = _size(path)
                shutil.rmtree(path, ignore_errors=True)
                lines.append(
                    f"removed {path} ({size / 2**30:.1f} GiB): weights of a run that was killed"
                )
    return lines


def _folders(parent: Path) -> list[Path]:
    """This user's own in `parent`, links not among them."""
    own = []
    with suppress(OSError):
        for path in sorted(parent.glob(f"{PREFIX}*")):
            with suppress(OSError):
                found = path.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                    own.append(path)
    return own


def _size(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.lstat().st_size
    return size


def _machine() -> str:
    """This boot of this machine, and the namespace of this process.

    Raises OSError if that cannot be known.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot}-{namespace}"
