"""What /proc knows about processes, and waiting for a condition."""

import re
import time
from collections.abc import Callable
from pathlib import Path


def children(pid: int) -> list[int]:
    """Ids of the children of a process, over all its threads."""
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in listed for child in path.read_text().split()]


def command_of(pid: int) -> bytes:
    """The arguments of a process, each followed by a NUL."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return not re.search(r"^State:\s+Z", status, re.MULTILINE)


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until the condition holds. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it takes more than {seconds} s"
        time.sleep(0.05)
