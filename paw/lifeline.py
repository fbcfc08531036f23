"""How processes end: with the one that started them, and not without what they have started.

No torch.
"""

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

    Linux kills it, whatever it is at, when the thread that started it ends: start it in one that
    lasts. Elsewhere a thread looks every second, which code that holds the interpreter keeps from
    running.
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


def end_tool_servers() -> None:
    """End the tool servers of verifiers before `os._exit`, which calls no exit handler.

    They have sessions of their own, which neither Ctrl-C nor the end of this process's group
    reaches.
    """
    if runtimes := sys.modules.get("verifiers.v1.runtimes.base"):
        runtimes.cleanup_at_exit()
