"""A parent process that watches a command from outside its interpreter.

Whatever an environment does to the command's process, the exit code is correct, one line says what
happened, and two signals end the command.

The parent is a bare interpreter, and the command runs in a child. Through one pipe, the child
announces an orderly end. Through another, its C signal handler reports the signals that have
reached it. The child dies with its parent. The ranks of `paw train --gpus` tell their launcher how
they end. This module imports neither torch nor anything else that the command imports.
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

from paw.processes.lifeline import die_with_parent

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that ask a command to stop."""
KEPT = {
    "train": "; checkpoints are kept (--resume auto)",
    "sft": "; the same command continues",
}
"""Command -> text added to a line about its end."""
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
"""Environment variable of a rank with the descriptor on which it tells its launcher how it ends."""
MOMENT_S = 0.3
"""A signal that reaches parent and child within this time was sent to both, as by a terminal."""
ANSWER_S = 3.0
"""Seconds that Python has to answer a signal before a line reports that it has not."""
GRACE_S = 5.0
"""Seconds that the command has to end after a second signal if it has answered the first."""
SHORT_GRACE_S = 1.0
"""Seconds that it has to end after a second signal if it has not answered the first."""
NEVER = float("inf")
_words: int | None = None
"""The descriptor on which this process announces how it ends; None if nobody listens."""


def watch(arguments: list[str]) -> None:
    """Fork if the command must be watched, and return in the child.

    The parent passes signals on, waits for the child, and ends as the child should have ended.
    """
    if not arguments or arguments[0] not in WATCHED:
        return
    if "-h" in arguments or "--help" in arguments:
        return
    if "RANK" in os.environ:  # the launcher is the parent, or torchrun
        _speak_to(int(os.environ.pop(PIPE, "-1")))
        return

    signals, signals_end = os.pipe()
    words, words_end = os.pipe()
    os.set_blocking(signals_end, False)
    parent = os.getpid()
    # This way no signal is lost before both processes are ready for it.
    usual_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPS, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        die_with_parent(parent)
        os.close(signals)
        os.close(words)
        _speak_to(words_end)
        signal.set_wakeup_fd(signals_end, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, usual_mask)
        return

    os.close(signals_end)
    os.close(words_end)
    try:
        _Watch(child, signals, words, arguments[0]).run(usual_mask)
    except BaseException as error:  # a bug: returning would run the command a second time
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(1)


def is_watched() -> bool:
    """Whether a parent ends this process at a second signal."""
    return _words is not None and "RANK" not in os.environ


def say_ending(code: int) -> None:
    """Tell the parent, if there is one, that this process ends orderly with that exit code."""
    _say(f"end {code}")


def say_heard() -> None:
    """Tell the parent, if there is one, that Python has received a signal."""
    _say("heard")


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle Ctrl-C in commands that do not need to finish anything.

    Tells the parent that Python has received the signal, and raises KeyboardInterrupt.
    """
    say_heard()
    signal.default_int_handler(number, frame)
    raise KeyboardInterrupt


def ending(words: str) -> int | None:
    """Return the exit code in a process's messages; None if it has not announced its end."""
    exit_code = None
    for line in words.splitlines():
        if line.startswith("end "):
            exit_code = int(line.removeprefix("end "))
    return exit_code


def read_words(descriptor: int) -> tuple[str, bool]:
    """Return (new messages of a process, whether it has closed its end of the pipe)."""
    os.set_blocking(descriptor, False)
    received = b""
    closed = False
    with suppress(BlockingIOError):
        while chunk := os.read(descriptor, 4096):
            received += chunk
        closed = True
    return received.decode(errors="replace"), closed


def unanswered(name: str) -> str:
    """Return the line to print for a signal that Python has not received."""
    return (
        f"{name}: Python does not answer; it may be in code that holds it forever (again: stop now)"
    )


def _speak_to(descriptor: int) -> None:
    """Make this process announce its end on `descriptor`, unless that is -1."""
    global _words
    if descriptor >= 0:
        os.set_inheritable(descriptor, False)
        _words = descriptor
        os.register_at_fork(after_in_child=_be_silent)


def _be_silent() -> None:
    """Called in a process that the command forks. Its end and signals are not the command's."""
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
    """The parent's side, with its knowledge of the child's signals and messages.

    A signal may reach the child directly, or only this process, which then passes it on. A terminal
    sends it to both within a short time, and such a signal counts once.
    """

    def __init__(self, child: int, signals: int, words: int, command: str) -> None:
        self._child = child
        self._signals = signals
        self._words = words
        self._command = command
        self._open = {signals, words}
        """The pipes that the child has not closed yet."""
        self._said = ""
        """All messages of the child."""
        self._arrived_at: dict[int, float] = {}
        """Signal -> time when this process last received it."""
        self._pass_on_at: dict[int, float] = {}
        """Signal that only this process has received so far -> time to pass it on."""
        self._on_their_way: dict[int, int] = {}
        """Signal -> how many have been passed on but have not reached the child yet."""
        self._direct_at: dict[int, float] = {}
        """Signal that has reached the child but not (yet) this process -> time when it did."""
        self._stops = 0
        """Number of stop signals that have reached the child."""
        self._last = signal.SIGTERM
        """The last of these signals."""
        self._warn_at = NEVER
        """Time at which to print that Python does not answer."""
        self._kill_at = NEVER
        self._killed = False

    def run(self, mask: Iterable[int]) -> NoReturn:
        """Watch until the child has ended, then end as it did. `mask` is the usual signal mask."""
        own_signals, own_signals_end = os.pipe()
        os.set_blocking(own_signals_end, False)
        signal.set_wakeup_fd(own_signals_end, warn_on_full_buffer=False)
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, {*mask} - {signal.SIGCHLD})

        status = None
        while status is None:
            readable, _, _ = select.select([own_signals, *self._open], [], [], self._timeout_s())
            ended_pid, wait_status = os.waitpid(self._child, os.WNOHANG)
            if ended_pid:
                status = wait_status
            if own_signals in readable:
                self._note_arrived(os.read(own_signals, 64))
            if self._signals in readable:
                self._note_reached(os.read(self._signals, 64))
            if self._words in readable or status is not None:
                self._read_words()
            if status is None:
                self._act()
        self._end(status)

    def _timeout_s(self) -> float:
        """Return the seconds until there is something to do, at most a minute."""
        next_time = min([self._warn_at, self._kill_at, *self._pass_on_at.values()])
        return min(60.0, max(0.0, next_time - time.monotonic()))

    def _note_arrived(self, numbers: bytes) -> None:
        """Note signals of this process. If the child has also received one, it is not passed on."""
        now = time.monotonic()
        for number in numbers:
            if number not in STOPS:
                continue
            # It was sent to the process, and again to its group.
            is_repeated = now - self._arrived_at.get(number, -MOMENT_S) < MOMENT_S
            child_has_it = now - self._direct_at.pop(number, -MOMENT_S) < MOMENT_S
            self._arrived_at[number] = now
            if not (is_repeated or child_has_it):
                self._pass_on_at[number] = now + MOMENT_S

    def _note_reached(self, numbers: bytes) -> None:
        """Note the child's signals. Its C handler reports them whatever Python is doing."""
        if not numbers:
            self._open.discard(self._signals)
        now = time.monotonic()
        for number in numbers:
            if number not in STOPS:
                continue
            if self._on_their_way.get(number):
                self._on_their_way[number] -= 1
            elif number in self._pass_on_at:
                del self._pass_on_at[number]
            else:
                self._direct_at[number] = now

            if number == signal.SIGHUP and self._stops:  # a closed terminal causes two
                continue
            self._stops += 1
            self._last = signal.Signals(number)
            if self._stops == 1:
                self._warn_at = now + ANSWER_S
            elif self._kill_at == NEVER and self._has_heard():
                self._kill_at = now + GRACE_S
            elif self._kill_at == NEVER:
                self._kill_at = now + SHORT_GRACE_S

    def _has_heard(self) -> bool:
        """Whether Python has answered a signal in the child."""
        return "heard" in self._said

    def _read_words(self) -> None:
        words, closed = read_words(self._words)
        self._said += words
        if closed:
            self._open.discard(self._words)
        if self._has_heard():
            self._warn_at = NEVER

    def _act(self) -> None:
        """Pass on signals, warn and kill, each when it is due."""
        now = time.monotonic()
        for number, pass_on_at in list(self._pass_on_at.items()):
            if pass_on_at > now:
                continue
            del self._pass_on_at[number]
            if number not in _pending(self._child):
                self._on_their_way[number] = self._on_their_way.get(number, 0) + 1
                os.kill(self._child, number)
        if self._warn_at <= now:
            self._warn_at = NEVER
            _print(unanswered(self._last.name))
        if self._kill_at <= now:
            self._kill_at = NEVER
            self._killed = True
            os.kill(self._child, signal.SIGKILL)

    def _end(self, status: int) -> NoReturn:
        """End as the child did or should have. Prints a line unless the child's end was orderly."""
        what_is_kept = KEPT.get(self._command, "")
        exit_code = ending(self._said)
        if exit_code is not None:
            os._exit(exit_code)
        if self._killed:
            _print(f"paw: stopped at once by a second {self._last.name}{what_is_kept}")
            os._exit(128 + self._last)
        if os.WIFSIGNALED(status):
            number = signal.Signals(os.WTERMSIG(status))
            if number not in STOPS:
                reason = ""
                if number == signal.SIGKILL:
                    reason = " (out of memory?)"
                _print(f"paw: {self._command} was killed by {number.name}{reason}{what_is_kept}")
            elif self._stops:
                _print(f"paw: stopped at once by a second {number.name}{what_is_kept}")
            _die_of(number)
        exit_code = os.waitstatus_to_exitcode(status)
        _print(f"paw: {self._command} {VANISHED.format(code=exit_code)}{what_is_kept}")
        os._exit(exit_code or 1)


def _pending(child: int) -> list[int]:
    """Return the stop signals that were sent to a process but that it has not received.

    The process has not had time for them yet, or it is stopped.
    """
    masks = []
    with suppress(OSError), Path(f"/proc/{child}/status").open() as lines:
        for line in lines:
            if line.startswith(("SigPnd", "ShdPnd")):
                masks.append(int(line.split()[1], 16))
    return [number for number in STOPS if any(mask >> (number - 1) & 1 for mask in masks)]


def _die_of(number: signal.Signals) -> NoReturn:
    """End this process by a signal, so that its parent sees how the child ended."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _print(line: str) -> None:
    with suppress(OSError):
        descriptor = 2
        if sys.__stderr__:
            descriptor = sys.__stderr__.fileno()
        os.write(descriptor, f"{line}\n".encode())
