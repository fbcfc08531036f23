"""How a process ends together with the one that started it, and with those that it has started.

Imports no torch.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal to send when the parent ends."""
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
