"""How a process ends together with the one that started it, and with those that it has started.

Imports no torch.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal to send when the parent ends."""
MOST_DESCRIPTORS = 1024
"""Descriptors that a process is given by the one that forks it are below this."""
WATCH_S = 1.0
"""Seconds between two looks at the parent on systems without prctl."""


def die_with_parent(parent: int) -> None:
    """Make this process end when process `parent`, which started it, ends.

    Linux kills it, whatever it is doing, when the thread that started it ends, so start it in a
    thread that lasts. On other systems a thread looks every second, unless code that holds the
    interpreter keeps that thread from running.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def end_group_with_this() -> None:
    """Have all that this process starts end with it, even by kill -9. Does so on Linux alone.

    This process must lead a process group, which a process that only waits kills in the end; what
    leaves the group is not reached. That process is not a child of this one, so code that waits for
    any child is not held up. Call this before there are threads, because it forks.
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
        _kill_group_after(leader)
    os._exit(0)


def _kill_group_after(leader: int) -> None:
    """Kill the group of process `leader`, this one's too, once that process has ended."""
    os.closerange(0, MOST_DESCRIPTORS)  # another process may wait for their ends
    try:
        ended = os.pidfd_open(leader)
    except ProcessLookupError:
        pass
    except OSError:  # a Linux before 5.3
        os._exit(0)
    else:
        select.select([ended], [], [])
    os.killpg(leader, signal.SIGKILL)


def _watch(parent: int) -> None:
    """End this process once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


def end_tool_servers() -> None:
    """End the tool servers of verifiers before `os._exit`, which calls no exit handlers.

    They have their own sessions, which neither Ctrl-C nor the end of this process's group reaches.
    """
    runtimes = sys.modules.get("verifiers.v1.runtimes.base")
    if runtimes:
        runtimes.cleanup_at_exit()
