import os
import signal


def run() -> None:
    """The `paw` command. Ctrl-C ends it at once while it is imported, and training while things load: an exception may
    be swallowed there, and inside a starting C++ library it aborts.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from paw.cli import entry

    entry()


if __name__ == "__main__":
    run()
