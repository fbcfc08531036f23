"""The parent of a vLLM server: ends it, and all that it started, with the trainer. It imports no torch: it is small."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from paw.state.signals import STOPS

GRACE_S = 10.0
"""Seconds for a server to end after SIGTERM, before SIGKILL."""


def main(command: Sequence[str], parent: int) -> int:
    """Run `command` until it ends or the pipe `parent` is closed; then nothing of it is left."""
    for number in STOPS:  # of a terminal or a launcher: the trainer saves first
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_listen_again)
    ended = threading.Event()

    def end() -> None:
        while os.read(parent, 1):
            pass
        for number, grace in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 0.0)):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            ended.wait(grace)

    threading.Thread(target=end, daemon=True).start()
    code = child.wait()
    ended.set()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it started
    return code if code >= 0 else 128 - code


def _listen_again() -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin.fileno()))
