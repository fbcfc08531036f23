import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from paw.processes import watcher


def run() -> None:
    """The `paw` command, under a parent process that watches it.

    Ctrl-C ends it at once while it is imported, and training also while things load: there an
    exception may be swallowed, and inside a C++ library that starts it aborts.
    """
    watcher.watch(sys.argv[1:])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)
    from paw.cli import entry

    entry()


def _end_at_once(*_: object) -> NoReturn:
    """The handler of Ctrl-C while things load; of several ranks the first prints a line."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, b"\npaw: interrupted while loading\n")
    watcher.say_ending(130)
    os._exit(130)


if __name__ == "__main__":
    run()
