import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from paw.processes import watcher


def run() -> None:
    """Run the `paw` command under a parent process that watches it.

    While `paw` is being imported, Ctrl-C ends it at once. In training, it does so while things load
    too: an exception there may be swallowed, or abort a C++ library that is starting.
    """
    watcher.watch(sys.argv[1:])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)
    from paw.cli import entry

    entry()


def _end_at_once(*_: object) -> NoReturn:
    """Handle Ctrl-C while things load. With several ranks, only the first prints a line."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, b"\npaw: interrupted while loading\n")
    watcher.say_ending(130)
    os._exit(130)


if __name__ == "__main__":
    run()
