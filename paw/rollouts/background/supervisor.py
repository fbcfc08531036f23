"""The parent of the process that plays ahead. It cleans up when that process or the trainer ends.

It does not import torch, so it stays small.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paw.rundir.signals import STOPS

CLOSE_S = 10.0
"""Seconds for the process to close its environments."""
LINGER_S = 3.0
"""Seconds that its children have to end by themselves, then to end after SIGTERM."""
TICK_S = 1.0
LOOK_S = 0.05
PR_SET_CHILD_SUBREAPER = 36
END_NOW = b"."


def main(trainer: int, command: Sequence[str], socket_fd: int) -> int:
    """Run `command`, with the socket's number as its last argument, and clean up after it.

    It runs until the command ends by itself, the trainer ends, or END_NOW comes on standard input.
    Returns the command's exit code, or 128 + N if signal N ended it.
    """
    for number in STOPS:  # a terminal or launcher sends them here too, but the trainer saves first
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # orphans become children of this process
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(
        [*command, str(socket_fd)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=[socket_fd],
    )
    os.close(socket_fd)
    ended = threading.Event()
    threading.Thread(target=_kill_in_time, args=(child.pid, trainer, ended), daemon=True).start()

    exit_code = _wait_for(child.pid)
    ended.set()
    _end_descendants(child.pid)
    return exit_code if exit_code >= 0 else 128 - exit_code


def _kill_in_time(pid: int, trainer: int, ended: threading.Event) -> None:
    """Kill the process if the trainer asks for it, or some time after the trainer ends."""
    message = None
    while message is None and os.getppid() == trainer:
        readable, _, _ = select.select([0], [], [], TICK_S)
        message = os.read(0, 1) if readable else None
    if message != END_NOW:  # the trainer has ended; the process notices through its socket
        ended.wait(CLOSE_S)
    if not ended.is_set():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _wait_for(pid: int) -> int:
    """Wait for the process and return its exit code. Also reaps orphans that end meanwhile."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _end_descendants(group: int) -> None:
    """End everything the process left running, in any process group."""
    if sys.platform != "linux":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    _wait_for_children(LINGER_S)
    _wait_for_children(LINGER_S, signal.SIGTERM)
    _wait_for_children(float("inf"), signal.SIGKILL)


def _wait_for_children(seconds: float, number: signal.Signals | None = None) -> None:
    """Wait at most `seconds` until no child is left. Sends each the signal `number` once."""
    deadline = time.monotonic() + seconds
    signalled = set[int]()
    while _reap() and time.monotonic() < deadline:
        if number:
            for pid in set(_children()) - signalled:
                signalled.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(LOOK_S)


def _reap() -> bool:
    """Reap children that have ended. Returns whether any is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    """Ids of this process's children."""
    children: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = path.read_bytes().rpartition(b") ")[2].split()[1]
            if int(parent) == os.getpid():
                children.append(int(path.parent.name))
    return children


if __name__ == "__main__":
    sys.exit(
        main(
            int(sys.argv[1]),
            [sys.executable, "-m", "paw.rollouts.background.player"],
            int(sys.argv[2]),
        )
    )
