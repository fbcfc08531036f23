"""A clean stop between updates. The first signal asks for it, and a second one ends the process.

Elsewhere, `paw.__main__` handles Ctrl-C. This module does not import torch.
"""

import os
import select
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from paw.processes.watcher import STOPS, is_watched, say_ending, say_heard

GRACE_S = 5.0
"""Seconds that the main thread has to stop after a second signal."""
_active: list["StopSignal"] = []
_masks = threading.local()
"""The signal mask of a thread before it forks."""


def _before_fork() -> None:
    """Block the signals.

    A child's signals are not meant for the run, so they wait until the child has its own handlers.
    """
    _masks.before_fork = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before_fork)


def _in_child() -> None:
    if _active:
        _active.clear()
        signal.set_wakeup_fd(-1)
        _restore_default_handlers()
    if signal.getsignal(signal.SIGTERM) is _ignore:
        _restore_default_handlers()
    _after_fork()


def ignore_stops() -> None:
    """Make this process ignore the signals that stop a run.

    It gets handlers that do nothing, because programs that it starts would inherit SIG_IGN. Those
    programs and forked children have the default handlers.
    """
    for number in STOPS:
        signal.signal(number, _ignore)


def _ignore(*_: object) -> None:
    return


def _restore_default_handlers() -> None:
    """Restore the default handler of each signal that is not ignored."""
    for number in STOPS:
        if signal.getsignal(number) is signal.SIG_IGN:
            continue
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        else:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _write(text: str) -> None:
    """Write to stderr if it is still open.

    This does not use `print`, which a signal handler must not re-enter.
    """
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


class StopSignal:
    """The first SIGTERM, SIGINT or SIGHUP sets `requested`, and a second one ends the process.

    It is a context manager, which does nothing in a thread other than the main one. A second SIGHUP
    does not end the process, because a closed terminal causes two, one from the shell and one from
    the kernel. An ignored signal (nohup) stays ignored.

    Ranks get the signal at different moments, so they agree on the flag before they act on it. If
    the main thread is in a call that does not return, such as a collective one, a thread or the
    parent (`paw.processes.watcher`) handles the second signal.
    """

    def __init__(self, unit: str = "update", resume_hint: str = "--resume auto") -> None:
        """`unit` names the work to finish first. `resume_hint` says how to continue later."""
        self._unit = unit
        self._resume_hint = resume_hint
        self.requested = False
        self.name = ""
        """The name of the first signal."""
        self._earlier_handlers: dict[int, Any] = {}
        self._earlier_wakeup_fd = -1
        self._wakeup_fd: int | None = None
        """The end of a pipe to which Python writes the numbers of signals."""

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python has signal handlers in the main thread alone
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._earlier_handlers[number] = signal.signal(number, self._on_first_signal)
        _active.append(self)
        if is_watched():  # the parent handles the second signal
            return self
        numbers_fd, self._wakeup_fd = os.pipe()
        os.set_blocking(self._wakeup_fd, False)
        self._earlier_wakeup_fd = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(numbers_fd,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self not in _active:
            return
        _active.remove(self)
        if self._wakeup_fd is not None:
            signal.set_wakeup_fd(self._earlier_wakeup_fd)
            os.close(self._wakeup_fd)
            self._wakeup_fd = None
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)

    def _on_first_signal(self, number: int, _: FrameType | None) -> None:
        self.requested = True
        self.name = signal.Signals(number).name
        say_heard()
        _restore_default_handlers()
        if signal.SIGHUP in self._earlier_handlers:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _write(f"{self.name}: finishing this {self._unit}, then saving (again: stop now)")

    def _watch(self, numbers_fd: int) -> None:
        """End the process at the second signal, unless the main thread does so in time.

        Python's handlers run only in the main thread, but signal numbers arrive here at once.
        """
        stops = 0
        with os.fdopen(numbers_fd, "rb", buffering=0) as numbers:
            while byte := numbers.read(1):
                number = byte[0]
                if stops and number == signal.SIGHUP:
                    continue
                if number in self._earlier_handlers:
                    stops += 1
                if stops < 2:
                    continue
                # The pipe is readable if the main thread closes it in time or another signal
                # arrives.
                readable, _, _ = select.select([numbers], [], [], GRACE_S)
                if not readable:
                    _write(f"stopped at once: the newest checkpoint is kept ({self._resume_hint})")
                    say_ending(128 + number)
                    os._exit(128 + number)
