"""A process that ends with the one that started it, however that ends. No torch."""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
WATCH_S = 1.0


def die_with_parent(parent: int) -> None:
    """Have this process end with process `parent`, which started it.

    Linux kills it, whatever it is at, when the thread that started it ends: start it in one that lasts. Elsewhere a
    thread looks every second, which code that holds the interpreter keeps from running.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it was quicker
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)
