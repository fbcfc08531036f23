"""Makes a process end with its parent, and makes the processes it started end with it.

`python lifeline.py PARENT WORDS...` runs a command this way. Imports no torch.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal to send when the parent ends."""
MARK = "PAW_PROGRAM"
"""Variable whose value all processes of a program have in common, wherever they have gone."""
ROUNDS = 100
"""Times that processes with the mark are looked for, since those that live may start others."""
PAUSE_S = 0.01
MOST_DESCRIPTORS = 1024
"""Descriptors that a forked process inherits are below this number."""
WATCH_S = 1.0
"""Seconds between two checks of the parent on systems without prctl."""


def die_with_parent(parent: int) -> None:
    """Make this process end when process `parent`, which started it, ends.

    Linux kills it, whatever it is doing, when the thread that started it ends. So start it from a
    thread that lasts. On other systems a thread checks every second, unless code that holds the
    interpreter keeps that thread from running.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def end_group_with_this() -> None:
    """Make all processes that this one starts end with it, even after kill -9. Linux only.

    This process must lead a process group. A separate process waits for it to end and then kills
    the group, and the processes that have left the group but still have this one's MARK. The
    waiting process is not a child of this one, so it does not hold up code that waits for any
    child. Call this before there are threads, because it forks.
    """
    if sys.platform != "linux":
        return
    leader = os.getpid()
    assert os.getpgrp() == leader
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork() == 0:
        _kill_after(leader)
    os._exit(0)


def _kill_after(leader: int) -> None:
    """Kill the processes that `leader` has started, once it has ended."""
    os.setsid()  # or it would be killed with the group
    os.closerange(0, MOST_DESCRIPTORS)  # another process may be waiting for them to close
    try:
        ended = os.pidfd_open(leader)
    except ProcessLookupError:
        pass
    except OSError:  # a Linux before 5.3
        os._exit(0)
    else:
        select.select([ended], [], [])
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    mark = os.environ.get(MARK)
    for _ in range(ROUNDS if mark else 0):
        marked = _processes_with(f"{MARK}={mark}".encode())
        for pid in marked:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not marked:
            break
        time.sleep(PAUSE_S)


def _processes_with(variable: bytes) -> list[int]:
    """Return the other processes whose environment contains this "NAME=value"."""
    pids: list[int] = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # another user's, or it has just ended
                if variable in _content(f"/proc/{entry.name}/environ").split(b"\0"):
                    pids.append(int(entry.name))
    return pids


def _content(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts: list[bytes] = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _watch(parent: int) -> None:
    """End this process once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


def end_tool_servers() -> None:
    """End the tool servers of verifiers. Call before `os._exit`, which runs no exit handlers.

    They run in their own sessions, out of reach of Ctrl-C and of the end of this process's group.
    """
    runtimes = sys.modules.get("verifiers.v1.runtimes.base")
    if runtimes:
        runtimes.cleanup_at_exit()


def run_command(parent: int, words: list[str]) -> None:
    """Replace this process with the command `words`. It and its children end with `parent`.

    This process must lead a process group. If there is no such program, it ends with exit code 127.
    """
    die_with_parent(parent)
    end_group_with_this()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    run_command(int(sys.argv[1]), sys.argv[2:])
