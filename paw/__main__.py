import os
import signal


def run() -> None:
    """The `paw` command. While it is imported Ctrl-C ends it at once: an exception inside an import may be swallowed."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from paw.cli import entry

    entry()


if __name__ == "__main__":
    run()
