"""`paw train --gpus N`: one process per GPU of this machine, which end together. No torch until it starts them."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress

from paw.errors import UserError, to_stderr

LAUNCHER = "PAW_LAUNCHER"
"""Variable of a rank: the process that started it."""
GRACE_S = 3.0
"""Seconds for the others to say why they fail, once a rank has."""


def launch(count: int, arguments: list[str], *, device: str = "auto") -> int:
    """Run `paw <arguments>` in `count` processes on this machine; the exit code of one that failed, else 0.

    `device` is model.device: there are at most as many as GPUs, or on "cpu" as cores.

    When one fails the others are stopped: what they wait for will not come. The terminal is rank 0's; of another rank
    is shown what it wrote to standard error, if it failed first. SIGTERM goes on to all; Ctrl-C and the end of
    a terminal reach them anyway. They do not outlive this process.
    """
    import torch

    from paw.model.parallel import STORE

    available = os.cpu_count() or 1 if device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()
    if not 1 <= count <= available:
        raise UserError(f"--gpus {count}: from 1 to {available} on this machine; see `paw doctor`")
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count))}
    shared = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    told = 0

    def tell(*_: object) -> None:
        nonlocal told
        told += 1
        for rank in ranks:
            rank.terminate()

    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}
        shared[LAUNCHER] = str(os.getpid())
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1, count)]
        ranks: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate([None, *logs]):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | ({} if log else {STORE: str(listening.fileno())})
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "paw", *arguments],
                    env=threads | os.environ | shared | own,
                    stdout=log and subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=() if log else (listening.fileno(),),
                )
            )
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, tell)
        codes: list[int | None] = [None]
        patience = float("inf")
        while None in codes and time.monotonic() < patience:
            time.sleep(0.2)
            codes = [process.poll() for process in ranks]
            if any(codes) or told > 1:  # the others may still find the same mistake, or tell that they lost a peer
                patience = min(patience, time.monotonic() + GRACE_S)
        fates = [_stopped(process) for process in ranks]
        for process in ranks:
            process.kill()
            process.wait()
        failed = [rank for rank, code in enumerate(codes) if code]
        if not failed and None not in codes:
            return 0
        if None in codes and told > 1:
            return 128 + signal.SIGTERM
        # A mistake of the user says most, then a traceback, then which rank a signal ended; a lost peer says little.
        first = min(failed, key=lambda rank: (codes[rank] != 2, codes[rank] != 1, codes[rank] == 3, rank))
        if codes[first] not in (1, 2):
            fates = [fate or _killed(code, told) for fate, code in zip(fates, codes, strict=True)]
            for rank, fate in enumerate(fates):
                if fate:
                    to_stderr(f"paw: rank {rank} was {fate}; checkpoints are kept (--resume auto)")
            if any(fates):
                return max(1, codes[first] or 0)
        if first:
            logs[first - 1].seek(0)
            for line in logs[first - 1].read().decode(errors="replace").strip().splitlines():
                to_stderr(f"rank {first}: {line}")
        return max(1, codes[first] or 0)


def _stopped(process: subprocess.Popen[bytes]) -> str:
    with suppress(ChildProcessError):
        state = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if state:
            return f"stopped by {signal.Signals(state.si_status).name}"
    return ""


def _killed(code: int | None, told: int) -> str:
    asked = (-signal.SIGINT, *([-signal.SIGTERM] if told else []))
    return f"killed by {signal.Signals(-code).name}" if code and code < 0 and code not in asked else ""


def die_with_launcher() -> None:
    """Have the kernel end this rank with its launcher, however that ends."""
    if (launcher := os.environ.get(LAUNCHER)) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(launcher):  # it was quicker
            os._exit(1)
