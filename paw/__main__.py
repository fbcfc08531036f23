import os
import signal
import sys
from typing import NoReturn

from paw.processes import watcher


def run() -> None:
    """The `paw` command, under a parent process that watches it.

    Ctrl-C ends it at once while it is imported, and training also while things load: there an
    exception may be swallowed, and inside a C++ library that starts it aborts.
    """
    watcher.watch(sys.argv[1:])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from paw.cli import entry

    entry()


def _leave(*_: object) -> NoReturn:
    watcher.say_ending(130)
    os._exit(130)


if __name__ == "__main__":
    run()
