"""The parent of a vLLM server: ends it, and all that it started, with the trainer. It imports no torch: it is small.

If the trainer has ended without a word (kill -9), it also removes the folders of weights that the
trainer has left.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paw.rollouts.engines.weight_folders import is_running, remove_abandoned, started_at
from paw.state.signals import STOPS

GRACE_S = 10.0
"""Seconds for a server to end after SIGTERM, before SIGKILL."""
GOODBYE = b"."
"""What the trainer writes into the pipe before it closes it: it lives, and removes what is its own."""
WEIGHTS_DIR = "--weights-dir="
"""An option before the command: where the trainer leaves weights, if not in memory."""
LAST_S = 2.0
"""Seconds for the trainer to be gone after its end of the pipe is."""


def main(command: Sequence[str], parent: int, weights_dir: Path | None = None) -> int:
    """Run `command` until it ends or the pipe `parent` is closed; then nothing of it is left."""
    trainer = os.getppid()
    trainer_started = ""
    with suppress(OSError):
        trainer_started = started_at(trainer)
    for number in STOPS:  # of a terminal or a launcher: the trainer saves first
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_listen_again
    )
    ended = threading.Event()
    closed = threading.Event()
    goodbye = threading.Event()

    def end() -> None:
        while os.read(parent, 1):
            goodbye.set()
        closed.set()
        for number, grace in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 0.0)):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            ended.wait(grace)

    threading.Thread(target=end, daemon=True).start()
    code = child.wait()
    ended.set()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it started
    if closed.is_set() and not goodbye.is_set():
        deadline = time.monotonic() + LAST_S
        while is_running(trainer, trainer_started) and time.monotonic() < deadline:
            time.sleep(0.05)  # its files are closed before it is gone
        remove_abandoned([None, weights_dir])
    return code if code >= 0 else 128 - code


def _listen_again() -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    command = sys.argv[1:]
    weights_dir = None
    if command[0].startswith(WEIGHTS_DIR):
        weights_dir = Path(command.pop(0).removeprefix(WEIGHTS_DIR))
    sys.exit(main(command, sys.stdin.fileno(), weights_dir))
