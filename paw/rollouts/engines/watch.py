"""The parent of a vLLM server. It ends the server, and all it started, with the trainer. No torch.

If the trainer was killed (kill -9), it also removes the folders of weights that the trainer left
behind.
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
from paw.rundir.signals import STOPS

GRACE_S = 10.0
"""Seconds that a server has to end after SIGTERM, before SIGKILL."""
GOODBYE = b"."
"""What the trainer writes into the pipe before closing it. It says that the trainer was not killed
and removes its own folders."""
WEIGHTS_DIR = "--weights-dir="
"""An option before the command, with the folder for the trainer's weights if not in memory."""
LAST_S = 2.0
"""Seconds that the trainer has to end after its end of the pipe was closed."""


def main(command: Sequence[str], parent: int, weights_dir: Path | None = None) -> int:
    """Run `command` until it ends or the pipe `parent` closes, then end everything it started.

    Returns the exit code.
    """
    trainer = os.getppid()
    trainer_started = ""
    with suppress(OSError):
        trainer_started = started_at(trainer)
    # A terminal or launcher sends these to all processes, but the trainer saves first.
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_handle_stops
    )
    ended = threading.Event()
    closed = threading.Event()
    goodbye = threading.Event()

    def end_with_the_trainer() -> None:
        while os.read(parent, 1):
            goodbye.set()
        closed.set()
        for number, grace in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 0.0)):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            ended.wait(grace)

    threading.Thread(target=end_with_the_trainer, daemon=True).start()
    exit_code = child.wait()
    ended.set()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it started
    if closed.is_set() and not goodbye.is_set():
        deadline = time.monotonic() + LAST_S
        while is_running(trainer, trainer_started) and time.monotonic() < deadline:
            time.sleep(0.05)  # an ending process closes its files first
        remove_abandoned([None, weights_dir])
    return exit_code if exit_code >= 0 else 128 - exit_code


def _handle_stops() -> None:
    """Restore the default action of the signals that stop a process."""
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    command = sys.argv[1:]
    weights_dir = None
    if command[0].startswith(WEIGHTS_DIR):
        weights_dir = Path(command.pop(0).removeprefix(WEIGHTS_DIR))
    sys.exit(main(command, sys.stdin.fileno(), weights_dir))
