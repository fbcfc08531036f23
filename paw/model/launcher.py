"""`paw train --gpus N`: one process per GPU of this machine, which end together.

No torch until it starts them.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress

from paw import watcher
from paw.errors import UserError, to_stderr
from paw.lifeline import die_with_parent

LAUNCHER = "PAW_LAUNCHER"
"""Variable of a rank: the process that started it."""
GRACE_S = 3.0
"""Seconds for the others to say why they fail, once a rank has."""


def launch(count: int, arguments: list[str], *, device: str = "auto") -> int:
    """Run `paw <arguments>` in `count` processes on this machine; the exit code of one that failed, else 0.

    `device` is model.device: there are at most as many as GPUs, or on "cpu" as cores.

    When one fails the others are stopped: what they wait for will not come. The terminal is rank
    0's; of another rank is shown what it wrote to standard error, if it failed first. SIGTERM goes
    on to all; Ctrl-C and the end of a terminal reach them anyway. They do not outlive this process.
    One that has not said that it ends in order has failed, whatever its exit code.
    """
    import torch

    from paw.model.parallel import STORE

    available = (
        os.cpu_count() or 1
        if device == "cpu" or not torch.cuda.is_available()
        else torch.cuda.device_count()
    )
    if not 1 <= count <= available:
        raise UserError(f"--gpus {count}: from 1 to {available} on this machine; see `paw doctor`")
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count))}
    shared = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    told: list[float] = []
    """When signals to stop came."""
    last = signal.SIGTERM

    def note(number: int, _: object) -> None:
        nonlocal last
        last = signal.Signals(number)
        told.append(time.monotonic())
        watcher.say_heard()

    def tell(number: int, frame: object) -> None:
        note(number, frame)
        for rank in ranks:
            rank.process.terminate()

    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}
        shared[LAUNCHER] = str(os.getpid())
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1, count)]
        ranks: list[_Rank] = []
        for rank, log in enumerate([None, *logs]):
            words, words_end = os.pipe()
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), watcher.PIPE: str(words_end)}
            own |= {} if log else {STORE: str(listening.fileno())}
            process = subprocess.Popen(
                [sys.executable, "-m", "paw", *arguments],
                env=threads | os.environ | shared | own,
                stdout=log and subprocess.DEVNULL,
                stderr=log,
                pass_fds=(words_end,) if log else (words_end, listening.fileno()),
            )
            os.close(words_end)
            stack.callback(os.close, words)
            ranks.append(_Rank(process, words))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, note)  # the terminal has sent it to the ranks too
        signal.signal(signal.SIGTERM, tell)

        patience = float("inf")
        warned = False
        while any(rank.code is None for rank in ranks) and time.monotonic() < patience:
            time.sleep(0.2)
            for rank in ranks:
                rank.look()
            if (
                any(rank.code for rank in ranks) or len(told) > 1
            ):  # the others may still say what is wrong
                patience = min(patience, time.monotonic() + GRACE_S)
            if told and not warned and time.monotonic() > told[0] + watcher.ANSWER_S:
                warned = True
                if not all(rank.heard for rank in ranks):
                    to_stderr(watcher.unanswered(last.name))
        fates = [_stopped(rank.process) for rank in ranks]
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
        codes = [rank.code for rank in ranks]
        failed = [place for place, code in enumerate(codes) if code]
        if not failed and None not in codes:
            return 0
        if None in codes and len(told) > 1:
            to_stderr(
                f"paw: stopped at once by a second {last.name}; checkpoints are kept (--resume auto)"
            )
            return 128 + last
        # What is not PaW's says nothing. A mistake of the user says most, then a traceback, then
        # which rank a signal ended; a lost peer says little.
        first = min(
            failed,
            key=lambda place: (
                not ranks[place].vanished,
                codes[place] != 2,
                codes[place] != 1,
                codes[place] == 3,
                place,
            ),
        )
        if codes[first] not in (1, 2) or ranks[first].vanished:
            fates = [fate or rank.fate(len(told)) for fate, rank in zip(fates, ranks, strict=True)]
            for place, fate in enumerate(fates):
                if fate:
                    to_stderr(f"paw: rank {place} {fate}; checkpoints are kept (--resume auto)")
            if any(fates):
                return max(1, codes[first] or 0)
        if first:
            logs[first - 1].seek(0)
            for line in logs[first - 1].read().decode(errors="replace").strip().splitlines():
                to_stderr(f"rank {first}: {line}")
        return max(1, codes[first] or 0)


class _Rank:
    """A rank's process, and what it says on the descriptor `words`."""

    def __init__(self, process: "subprocess.Popen[bytes]", words: int) -> None:
        self.process, self._words = process, words
        self.code: int | None = None
        """How it ended, None while it runs; not 0 if it did not say so."""
        self.vanished = False
        """Whether it ended without a signal, and without saying so."""
        self._said = ""

    @property
    def heard(self) -> bool:
        return "heard" in self._said or self.code is not None

    def look(self) -> None:
        code = self.process.poll()
        self._said += watcher.read_words(self._words)[0]
        if code is not None and code >= 0 and watcher.ending(self._said) is None:
            self.vanished = True
            code = max(1, code)
        self.code = code

    def fate(self, told: int) -> str:
        """What happened to it, "" if it said so itself, or was asked to end `told` times."""
        if self.vanished:
            return watcher.VANISHED.format(code=self.process.returncode)
        asked = (-signal.SIGINT, *([-signal.SIGTERM] if told else []))
        if self.code is None or self.code >= 0 or self.code in asked:
            return ""
        return f"was killed by {signal.Signals(-self.code).name}"


def _stopped(process: subprocess.Popen[bytes]) -> str:
    with suppress(ChildProcessError):
        state = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if state:
            return f"was stopped by {signal.Signals(state.si_status).name}"
    return ""


def die_with_launcher() -> None:
    """Have the kernel end this rank with its launcher, however that ends."""
    if launcher := os.environ.get(LAUNCHER):
        die_with_parent(int(launcher))
