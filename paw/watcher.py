"""A parent that watches a command, outside the lock of its interpreter: whatever an environment
does to the process, the exit code is true, one line says what happened, and two signals end it.

The parent is a bare interpreter, the command runs in a child. The child says through a pipe that it
has ended in order, and through another one, from the C handler of its signals, which ones have
reached it. It dies with its parent. The ranks of `paw train --gpus` say how they end to their
launcher. No torch, and nothing of what the command imports.
"""

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from paw.lifeline import die_with_parent

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
KEPT = {
    "train": "; checkpoints are kept (--resume auto)",
    "sft": "; the same command goes on from what it has saved",
}
WATCHED = (
    "train",
    "eval",
    "rollout",
    "profile",
    "experiment",
    "sft",
    "rwml",
    "play",
    "serve",
    "warmup",
    "env",
)
"""Commands that run environments or agents."""
VANISHED = (
    "ended inside code that is not PaW's, with exit code {code} (os._exit? see env.processes)"
)
PIPE = "PAW_WATCHER"
"""Variable of a rank: the descriptor on which it tells its launcher how it ends."""
MOMENT_S = 0.3
"""A signal that reaches parent and child within that time was sent to both, as a terminal does."""
ANSWER_S = 3.0
"""Seconds for Python to answer a signal, before a line says that it does not."""
GRACE_S = 5.0
"""Seconds for it to end after a second signal; one if it did not answer the first."""
_words: int | None = None


def watch(arguments: list[str]) -> None:
    """Fork, and return in the child.

    The parent passes signals on, waits for it, and ends as it should have ended.
    """
    if not arguments or arguments[0] not in WATCHED or {"-h", "--help"} & {*arguments}:
        return
    if "RANK" in os.environ:  # the launcher is the parent, or torchrun
        _speak_to(int(os.environ.pop(PIPE, "-1")))
        return
    signals, signals_end = os.pipe()
    words, words_end = os.pipe()
    os.set_blocking(signals_end, False)
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPS, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        die_with_parent(parent)
        os.close(signals)
        os.close(words)
        _speak_to(words_end)
        signal.set_wakeup_fd(signals_end, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.close(signals_end)
    os.close(words_end)
    try:
        _Watch(child, signals, words, arguments[0]).run(before)
    except BaseException as error:  # a bug, which must not look like a second command that goes on
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(1)


def is_watched() -> bool:
    """Whether a parent sees to a second signal."""
    return _words is not None and "RANK" not in os.environ


def say_ending(code: int) -> None:
    """This process ends in order, with that exit code."""
    _say(f"end {code}")


def say_heard() -> None:
    """Python has heard of a signal."""
    _say("heard")


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """The handler of Ctrl-C in commands that need not finish anything: says that Python has heard
    it, and raises KeyboardInterrupt.
    """
    say_heard()
    signal.default_int_handler(number, frame)
    raise KeyboardInterrupt


def ending(words: str) -> int | None:
    """The exit code in what a process has said, None if it has not ended in order."""
    codes = [
        int(line.removeprefix("end ")) for line in words.splitlines() if line.startswith("end ")
    ]
    return codes[-1] if codes else None


def read_words(descriptor: int) -> tuple[str, bool]:
    """What a process has said since, and whether it can say no more."""
    os.set_blocking(descriptor, False)
    said = b""
    with suppress(BlockingIOError):
        while chunk := os.read(descriptor, 4096):
            said += chunk
        return said.decode(errors="replace"), True
    return said.decode(errors="replace"), False


def unanswered(name: str) -> str:
    """What to say when Python does not hear of a signal."""
    return f"{name}: Python does not answer, it may be in code that holds it for ever (again: stop now)"


def _speak_to(descriptor: int) -> None:
    global _words
    if descriptor >= 0:
        os.set_inheritable(descriptor, False)
        _words = descriptor
        os.register_at_fork(after_in_child=_be_silent)


def _be_silent() -> None:
    """In a process that the command has forked: its end and its signals are not the command's."""
    global _words
    if _words is not None:
        os.close(_words)
        _words = None
        if "RANK" not in os.environ:
            signal.set_wakeup_fd(-1)


def _say(word: str) -> None:
    if _words is not None:
        with suppress(OSError):
            os.write(_words, f"{word}\n".encode())


class _Watch:
    """What the parent knows."""

    def __init__(self, child: int, signals: int, words: int, command: str) -> None:
        self._child, self._signals, self._words, self._command = child, signals, words, command
        self._open = {signals, words}
        self._said = ""
        self._came_at: dict[int, float] = {}
        """Signals of this process: when the last one came."""
        self._own: dict[int, float] = {}
        """Signals that came here alone so far: when they will be passed on."""
        self._passed: dict[int, int] = {}
        """Signals that were passed on: how many of them have not reached the child."""
        self._direct: dict[int, float] = {}
        """Signals that reached the child, but not (yet) this process: when."""
        self._stops = 0
        self._last = signal.SIGTERM
        self._tell_at = self._kill_at = float("inf")
        self._killed = False

    def run(self, mask: Iterable[int]) -> NoReturn:
        """Until the child has ended."""
        came, came_end = os.pipe()
        os.set_blocking(came_end, False)
        signal.set_wakeup_fd(came_end, warn_on_full_buffer=False)
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, {*mask} - {signal.SIGCHLD})
        status = None
        while status is None:
            ready, _, _ = select.select([came, *self._open], [], [], self._patience())
            pid, found = os.waitpid(self._child, os.WNOHANG)
            status = found if pid else None
            if came in ready:
                self._came(os.read(came, 64))
            if self._signals in ready:
                self._reached(os.read(self._signals, 64))
            if self._words in ready or status is not None:
                self._hear()
            if status is None:
                self._act()
        self._end(status)

    def _patience(self) -> float:
        first = min([self._tell_at, self._kill_at, *self._own.values()])
        return min(60.0, max(0.0, first - time.monotonic()))

    def _came(self, numbers: bytes) -> None:
        """Signals of this process. Those that the child has too are not passed on."""
        now = time.monotonic()
        for number in numbers:
            if number not in STOPS:
                continue
            again = (
                now - self._came_at.get(number, -MOMENT_S) < MOMENT_S
            )  # to the process, and to its group
            direct = now - self._direct.pop(number, -MOMENT_S) < MOMENT_S
            self._came_at[number] = now
            if not (again or direct):
                self._own[number] = now + MOMENT_S

    def _reached(self, numbers: bytes) -> None:
        """Signals of the child, which its C handler writes down whatever Python is at."""
        if not numbers:
            self._open.discard(self._signals)
        now = time.monotonic()
        for number in numbers:
            if number not in STOPS:
                continue
            if self._passed.get(number):
                self._passed[number] -= 1
            elif self._own.pop(number, None) is None:
                self._direct[number] = now
            if number == signal.SIGHUP and self._stops:  # a closed terminal sends two
                continue
            self._stops += 1
            self._last = signal.Signals(number)
            if self._stops == 1:
                self._tell_at = now + ANSWER_S
            elif self._kill_at == float("inf"):
                self._kill_at = now + (GRACE_S if "heard" in self._said else 1.0)

    def _hear(self) -> None:
        words, ended = read_words(self._words)
        self._said += words
        if ended:
            self._open.discard(self._words)
        if "heard" in self._said:
            self._tell_at = float("inf")

    def _act(self) -> None:
        now = time.monotonic()
        for number in [number for number, at in self._own.items() if at <= now]:
            del self._own[number]
            if number not in _pending(self._child):
                self._passed[number] = self._passed.get(number, 0) + 1
                os.kill(self._child, number)
        if self._tell_at <= now:
            self._tell_at = float("inf")
            _print(unanswered(self._last.name))
        if self._kill_at <= now:
            self._kill_at, self._killed = float("inf"), True
            os.kill(self._child, signal.SIGKILL)

    def _end(self, status: int) -> NoReturn:
        """End as the child did, or as it should have; with a line if it ended in no order."""
        kept = KEPT.get(self._command, "")
        if (code := ending(self._said)) is not None:
            os._exit(code)
        if self._killed:
            _print(f"paw: stopped at once by a second {self._last.name}{kept}")
            os._exit(128 + self._last)
        if os.WIFSIGNALED(status):
            number = signal.Signals(os.WTERMSIG(status))
            if number not in STOPS:
                memory = " (for want of memory?)" if number == signal.SIGKILL else ""
                _print(f"paw: {self._command} was killed by {number.name}{memory}{kept}")
            elif self._stops:
                _print(f"paw: stopped at once by a second {number.name}{kept}")
            _die_of(number)
        code = os.waitstatus_to_exitcode(status)
        _print(f"paw: {self._command} {VANISHED.format(code=code)}{kept}")
        os._exit(code or 1)


def _pending(child: int) -> list[int]:
    """Signals that a process has been sent and not received: it had no time yet, or it is stopped."""
    masks = []
    with suppress(OSError), Path(f"/proc/{child}/status").open() as lines:
        masks = [
            int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))
        ]
    return [number for number in STOPS if any(mask >> (number - 1) & 1 for mask in masks)]


def _die_of(number: signal.Signals) -> NoReturn:
    """So that whoever waits sees the same."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _print(line: str) -> None:
    with suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{line}\n".encode())
