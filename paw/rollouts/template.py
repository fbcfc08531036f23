"""Chat templates within limits: a template is a program of whoever made the model, and may never end.

Before it is rendered here for the first time, a process with limits renders the same conversations
(`try_template`). What a later conversation makes of it has a limit of time alone (`within`).
"""

import ctypes
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from paw.rollouts import trial

T = TypeVar("T")
RENDER_S = 5
"""Seconds of a processor for the trial of a template."""
PATIENCE_S = 60.0
"""Seconds for it by the clock: a template has nothing to wait for, but the machine may be busy."""
TURN_S = 20.0
"""Seconds by the clock for a conversation later on, which takes a few milliseconds."""
MEMORY = 1 << 30
"""Bytes for the trial, its program included."""


class TemplateLimitError(Exception):
    """A template takes more time or memory than it may. One line says which."""


def try_template(templates: Sequence[tuple[str, list[dict[str, Any]]]]) -> None:
    """Render (template, variables of several conversations) in another process. Raises
    TemplateLimitError if that takes too much time or memory; what else a template raises passes."""
    limits = {"memory": MEMORY, "seconds": RENDER_S, "templates": templates}
    if why := _fault(json.dumps(limits, default=str)):
        raise TemplateLimitError(why)


@lru_cache(64)
def _fault(limits: str) -> str:
    """What the trial exceeded, or ""."""
    command = [sys.executable, "-P", trial.__file__]
    try:
        done = subprocess.run(
            command, input=limits, capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {PATIENCE_S:g} s"
    if done.returncode == trial.EXCEEDED:
        return f"it takes more than {MEMORY >> 20:,} MiB of memory"
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {RENDER_S} s of a processor"
    if done.returncode:
        last = [*done.stderr.strip().splitlines(), f"exit code {done.returncode}"][-1]
        return f"its trial failed ({last})"
    return ""


def within(seconds: float, call: Callable[[], T]) -> T:
    """What `call()` returns or raises, in a thread of its own. TemplateLimitError if it takes
    longer: the thread is then told to end, and does so at its next step of Python."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        )
        raise TemplateLimitError(f"it takes more than {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
