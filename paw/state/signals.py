"""A clean stop between updates. Before it, and after it, Ctrl-C is `paw.__main__`'s. No torch."""

import os
import select
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from paw.watcher import STOPS, is_watched, say_ending, say_heard

GRACE_S = 5.0
"""Seconds for the main thread to stop at a second signal."""
_active: list["StopSignal"] = []
_masks = threading.local()


def _before_fork() -> None:
    """A child's signals are none of the run's: they wait until it has handlers of its own."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _in_child() -> None:
    if _active:
        _active.clear()
        signal.set_wakeup_fd(-1)
        _to_default()
    if signal.getsignal(signal.SIGTERM) is _ignore:
        _to_default()
    _after_fork()


def ignore_stops() -> None:
    """Have this process ignore them. By handlers, not by SIG_IGN, which the programs that it starts
    would inherit: those have the default handlers, and what it forks too."""
    for number in STOPS:
        signal.signal(number, _ignore)


def _ignore(*_: object) -> None:
    return


def _to_default() -> None:
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _write(text: str) -> None:
    """To stderr, if that is still there: a buffered print may not be re-entered from a signal handler."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


class StopSignal:
    """Context manager: the first SIGTERM, SIGINT or SIGHUP sets `requested`, a second one stops the
    process at once, but no SIGHUP: a closed terminal sends two, by the shell and by the kernel. One
    that is ignored (nohup) stays so.

    Ranks get the signal at different moments: they agree on the flag before they act on it. Main
    thread only. Where that is inside a call that does not return, such as a collective one, a
    thread sees to the second signal, or the parent (`paw.watcher`).
    """

    def __init__(self, unit: str = "update", goes_on: str = "--resume auto") -> None:
        self._unit, self._goes_on = unit, goes_on
        self.requested = False
        self.name = ""
        """Of the signal that came."""
        self._before: dict[int, Any] = {}
        self._writing: int | None = None

    def __enter__(self) -> Self:
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._first)
        _active.append(self)
        if is_watched():  # the parent sees to the second signal
            return self
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)
        if self._writing is not None:
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._writing)
            self._writing = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _first(self, number: int, _: FrameType | None) -> None:
        self.requested, self.name = True, signal.Signals(number).name
        say_heard()
        _to_default()
        if signal.SIGHUP in self._before:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _write(f"{self.name}: finishing this {self._unit}, then saving (again: stop now)")

    def _watch(self, reading: int) -> None:
        """Python's handlers wait for the main thread; the numbers of the signals come here meanwhile."""
        stops = 0
        with os.fdopen(reading, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if stops and number[0] == signal.SIGHUP:
                    continue
                stops += number[0] in self._before
                if stops > 1 and not select.select([numbers], [], [], GRACE_S)[0]:
                    _write(f"stopped at once: the newest checkpoint is kept ({self._goes_on})")
                    say_ending(128 + number[0])
                    os._exit(128 + number[0])
