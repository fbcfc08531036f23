"""`paw train --gpus N` runs one process per GPU of this machine. All of them end together.

torch is not imported before they are started.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from paw.errors import UserError, to_stderr
from paw.processes import watcher
from paw.processes.lifeline import die_with_parent

LAUNCHER = "PAW_LAUNCHER"
"""Environment variable of a rank that holds the id of the process that started it."""
STORE = "PAW_STORE_FD"
"""Environment variable of rank 0 with the descriptor of the socket on which the store listens,
which the launcher has opened."""
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")
"""Files of the drivers of NVIDIA, WSL, Jetson and AMD. Without one of them, torch has no GPU."""
GRACE_S = 3.0
"""Seconds that the other ranks have to report their own errors after one has failed."""


def launch(count: int, arguments: list[str], *, device: str = "auto") -> int:
    """Run `paw <arguments>` in `count` processes on this machine.

    Returns the exit code of a process that failed, or 0 if none did. A rank that ends without
    announcing it has failed, whatever its exit code. When one fails, the others are stopped,
    because they would wait for it forever.

    Rank 0 has the terminal. Another rank's standard error is shown if that rank failed first.
    SIGTERM is passed on to all ranks. Ctrl-C and the end of a terminal reach them anyway. The ranks
    do not outlive this process.

    Raises UserError if there are fewer than `count` GPUs, or fewer than `count` cores if `device`
    (model.device) is "cpu".
    """
    _check_count(count, device)
    stops = _StopSignals()
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1, count)]
        ranks = _start_ranks(arguments, [None, *logs], stack)
        _handle_signals(stops, ranks)
        _wait(stops, ranks)

        stopped = [_stopped(rank.process) for rank in ranks]
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
        return _report(stops, ranks, stopped)


def _check_count(count: int, device: str) -> None:
    available = os.cpu_count() or 1
    if device != "cpu":
        available = _count_gpus() or available
    if not 1 <= count <= available:
        raise UserError(f"--gpus {count}: this machine allows 1 to {available}; see `paw doctor`")


def _count_gpus() -> int:
    """Return the number of GPUs. Loads torch, which takes seconds, only if there may be one."""
    if not any(Path(file).exists() for file in GPU_FILES):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class _StopSignals:
    """The stop signals that this process has received."""

    def __init__(self) -> None:
        self.last = signal.SIGTERM
        self.times: list[float] = []
        """The arrival time of each signal."""

    @property
    def count(self) -> int:
        return len(self.times)

    def note(self, number: int, _frame: object) -> None:
        """Handle a signal."""
        self.last = signal.Signals(number)
        self.times.append(time.monotonic())
        watcher.say_heard()


class _Rank:
    """A rank's process, and its messages on the descriptor `words`, see `paw.processes.watcher`."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", words: int, log: BinaryIO | None
    ) -> None:
        self.process = process
        self.log = log
        """Its standard error; None for rank 0, which has the terminal."""
        self.code: int | None = None
        """Its exit code; None while it runs. Not 0 if it ended without announcing it."""
        self.vanished = False
        """Whether it ended without a signal and without announcing it."""
        self._descriptor = words
        self._words = ""

    @property
    def has_heard(self) -> bool:
        """Whether its Python has noticed a signal, or it has ended."""
        return "heard" in self._words or self.code is not None

    def poll(self) -> None:
        """Update what is known about the process."""
        exit_code = self.process.poll()
        new_words, _ = watcher.read_words(self._descriptor)
        self._words += new_words
        if exit_code is not None and exit_code >= 0 and watcher.ending(self._words) is None:
            self.vanished = True
            exit_code = max(1, exit_code)
        self.code = exit_code

    def fate(self, *, asked: bool) -> str:
        """Return what happened to it, or "" if it reported that itself or was `asked` to end."""
        if self.vanished:
            return watcher.VANISHED.format(code=self.process.returncode)
        if self.code is None or self.code >= 0 or self.code == -signal.SIGINT:
            return ""
        if asked and self.code == -signal.SIGTERM:
            return ""
        return f"was killed by {signal.Signals(-self.code).name}"


def _start_ranks(
    arguments: list[str], logs: Sequence[BinaryIO | None], stack: ExitStack
) -> list[_Rank]:
    """Start a rank for each log. `stack` closes the descriptors that this process has for them."""
    rank_count = len(logs)
    listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    cores_per_rank = max(1, len(os.sched_getaffinity(0)) // rank_count)
    variables = {
        "OMP_NUM_THREADS": str(cores_per_rank),
        **os.environ,  # this may set the number of threads
        "WORLD_SIZE": str(rank_count),
        "LOCAL_WORLD_SIZE": str(rank_count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listening.getsockname()[1]),
        LAUNCHER: str(os.getpid()),
    }
    ranks = []
    for rank, log in enumerate(logs):
        words, words_end = os.pipe()
        process = _start_rank(rank, arguments, variables, listening, words_end, log)
        os.close(words_end)
        stack.callback(os.close, words)
        ranks.append(_Rank(process, words, log))
    return ranks


def _start_rank(
    rank: int,
    arguments: list[str],
    variables: dict[str, str],
    listening: socket.socket,
    words_end: int,
    log: BinaryIO | None,
) -> "subprocess.Popen[bytes]":
    """Start one rank.

    Rank 0 has the terminal and the store's listening socket. Other ranks write to their `log`.
    """
    variables = variables | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        watcher.PIPE: str(words_end),
    }
    inherited = [words_end]
    stdout = subprocess.DEVNULL
    if rank == 0:
        variables[STORE] = str(listening.fileno())
        inherited.append(listening.fileno())
        stdout = None
    return subprocess.Popen(
        [sys.executable, "-m", "paw", *arguments],
        env=variables,
        stdout=stdout,
        stderr=log,
        pass_fds=inherited,
    )


def _handle_signals(stops: _StopSignals, ranks: list[_Rank]) -> None:
    def pass_on(number: int, frame: object) -> None:
        stops.note(number, frame)
        for rank in ranks:
            rank.process.terminate()

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stops.note)  # the terminal has also sent it to the ranks
    signal.signal(signal.SIGTERM, pass_on)


def _wait(stops: _StopSignals, ranks: list[_Rank]) -> None:
    """Wait until all ranks have ended, but at most GRACE_S after a failure or a second signal."""
    deadline = float("inf")
    warned = False
    while any(rank.code is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.2)
        for rank in ranks:
            rank.poll()
        if any(rank.code for rank in ranks) or stops.count > 1:
            # The other ranks may still report what is wrong.
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if stops.count and not warned and time.monotonic() > stops.times[0] + watcher.ANSWER_S:
            warned = True
            if not all(rank.has_heard for rank in ranks):
                to_stderr(watcher.unanswered(stops.last.name))


def _report(stops: _StopSignals, ranks: list[_Rank], stopped: list[str]) -> int:
    """Print why the run has ended, unless rank 0 has done so. Returns the exit code.

    For each rank, `stopped` names the signal that had stopped it when the others ended, or "".
    """
    some_ran_on = any(rank.code is None for rank in ranks)
    failed = [number for number, rank in enumerate(ranks) if rank.code]
    if not failed and not some_ran_on:
        return 0
    if some_ran_on and stops.count > 1:
        to_stderr(
            f"paw: stopped at once by a second {stops.last.name}; "
            "checkpoints are kept (--resume auto)"
        )
        return 128 + stops.last

    first_failed = _most_telling(failed, ranks)
    blamed = ranks[first_failed]
    if blamed.code not in (1, 2) or blamed.vanished:
        some_have_fates = False
        for number, (reason, rank) in enumerate(zip(stopped, ranks, strict=True)):
            fate = reason or rank.fate(asked=stops.count > 0)
            if fate:
                some_have_fates = True
                to_stderr(f"paw: rank {number} {fate}; checkpoints are kept (--resume auto)")
        if some_have_fates:
            return max(1, blamed.code or 0)
    if blamed.code == -signal.SIGINT:  # Ctrl-C, before its Python could handle it
        to_stderr("paw: interrupted while loading")
        return 128 + signal.SIGINT
    if blamed.log:
        blamed.log.seek(0)
        for line in blamed.log.read().decode(errors="replace").strip().splitlines():
            to_stderr(f"rank {first_failed}: {line}")
    return max(1, blamed.code or 0)


def _most_telling(failed: list[int], ranks: list[_Rank]) -> int:
    """Return the failed rank whose end says most about the cause. Ties go to the lowest rank.

    A rank that vanished in foreign code has reported nothing itself, so it comes first. Then come a
    user's mistake, a traceback, a rank ended by a signal and, last, a lost peer.
    """

    def position(number: int) -> tuple[bool, bool, bool, bool, int]:
        rank = ranks[number]
        return (not rank.vanished, rank.code != 2, rank.code != 1, rank.code == 3, number)

    return min(failed, key=position)


def _stopped(process: "subprocess.Popen[bytes]") -> str:
    """Return which signal has stopped (not ended) a process, or "" if none has."""
    with suppress(ChildProcessError):
        state = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if state:
            return f"was stopped by {signal.Signals(state.si_status).name}"
    return ""


def die_with_launcher() -> None:
    """Make the kernel end this rank when its launcher ends for any reason."""
    launcher = os.environ.get(LAUNCHER)
    if launcher:
        die_with_parent(int(launcher))
