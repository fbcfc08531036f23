"""Folders in which weights travel to servers, by default in memory. No torch.

    paw-weights-BOOT-NAMESPACE-PID-START-RANDOM

The name says which process made the folder. So the folders of a killed run can be removed, at the
start of any run or by the watcher of the run's servers. A process id may be reused after the
process has ended, so the name also has its start time. Ids are unique only within one boot of one
machine and one namespace (containers may share /dev/shm but number their processes separately).
Folders of another boot, namespace or user are left alone.
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
"""Its groups are the machine, the id of the process, and the start time of the process."""
STATE = 0
"""Field of /proc/PID/stat, counted after the command, see proc_pid_stat(5)."""
START = 19
"""Likewise."""
ENDED = ("Z", "X", "x")
"""States of a process that has ended but whose parent has not waited for it yet."""


def make_weight_folder(parent: Path | None = None) -> Path:
    """Make a folder for this process, in `parent` or in memory."""
    pid = os.getpid()
    owner = ""
    with suppress(OSError):  # without /proc no other process removes the folder
        owner = f"{_machine()}-{pid}-{started_at(pid)}-"
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner}", dir=parent or default_parent()))


def default_parent() -> Path:
    return MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())


def started_at(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; "" if it has ended.

    Raises OSError if there is no such process, or its start time cannot be found.
    """
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    fields = text.rpartition(") ")[2].split()
    return "" if fields[STATE] in ENDED else fields[START]


def is_running(pid: int, started: str) -> bool:
    """Whether the process `pid` started at `started` still runs; True if that is unknown."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it belongs to another user
    try:
        return started_at(pid) == started
    except OSError:
        return True


def remove_abandoned(parents: Iterable[Path | None]) -> list[str]:
    """Remove from `parents` this user's folders whose process has ended.

    None stands for the default parent. Returns a line about each folder.
    """
    lines: list[str] = []
    try:
        machine = _machine()
    except OSError:
        return lines
    for parent in {parent or default_parent() for parent in parents}:
        for path in _folders(parent):
            if _is_abandoned(path.name, machine):
                folder_bytes = _size(path)
                shutil.rmtree(path, ignore_errors=True)
                lines.append(
                    f"removed {path} ({folder_bytes / 2**30:.1f} GiB): "
                    "weights of a run that was killed"
                )
    return lines


def _is_abandoned(name: str, machine: str) -> bool:
    """Whether a folder of this name was made on this machine by a process that has ended."""
    match = NAME.fullmatch(name)
    if not match or match[1] != machine:
        return False
    return not is_running(pid=int(match[2]), started=match[3])


def _folders(parent: Path) -> list[Path]:
    """This user's folders of weights in `parent`, without links to folders."""
    folders = []
    with suppress(OSError):
        for path in sorted(parent.glob(f"{PREFIX}*")):
            with suppress(OSError):
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                    folders.append(path)
    return folders


def _size(folder: Path) -> int:
    """Bytes of all files."""
    folder_bytes = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            folder_bytes += path.lstat().st_size
    return folder_bytes


def _machine() -> str:
    """Identify this boot of this machine, and the namespace of this process.

    Raises OSError if that is unknown.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot}-{namespace}"
