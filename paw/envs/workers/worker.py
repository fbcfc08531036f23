"""A text game in a child process. If something goes wrong there, only one episode ends, not the
run.

TextWorld needs this, because its C library holds one game per process and calls exit() on bad
input. Parent and child take turns. Each request and each reply is one line with a JSON object, over
pipes:

    {"start": {"path": ...}}  ->  {"text": ..., "admissible": [...], "won": false}
    {"step": "look"}          ->  {"text": ..., "admissible": [...], "won": false}
                              or  {"error": "..."}

The child holds a game made by `factory(**start)`, an object with `reset()`, `step(command)`,
`admissible` and `won`. Anything the game prints is discarded. The child ends with its parent, at
the end of its input. If it is stuck in a game, it ends when its watchdog sees that the parent is
gone.
"""

import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from paw.envs.checked import Strict, checked
from paw.errors import EnvironmentFailure, UserError, describe

START_TIMEOUT_S = 120.0
"""Time limit for a child to start and import its game. This is slow on a busy machine."""
MAX_REPLY_BYTES = 1 << 20
MAX_COMMAND = 4096
"""Maximum number of characters of a command that are sent. No game's commands are longer. So a
request fits into the pipe's buffer, and writing it cannot block."""
WATCHDOG_S = 1.0
"""How often the child checks that its parent is alive."""


class ChildReply(Strict):
    """A line that the child writes."""

    text: str = ""
    admissible: list[str] = []
    won: bool = False
    error: str = ""


class Worker:
    """A game in a child process, with the interface of the game itself.

    `factory` is "module:name" of the function that makes a game, imported in the child. `timeout_s`
    limits each call. The child is kept from episode to episode.
    """

    admissible: list[str]
    won: bool

    def __init__(self, factory: str, *, timeout_s: float) -> None:
        self.factory = factory
        self.timeout_s = timeout_s
        self._child: subprocess.Popen | None = None
        self._kill: Callable[[], object] = lambda: None
        """Ends the child."""

    def start(self, **arguments: Any) -> str:
        """Make a new game from `arguments` that JSON can hold. Returns its first text.

        Raises EnvironmentFailure if the child breaks.
        """
        if self._child is None:
            self._start_child()
            self._receive("start", START_TIMEOUT_S)
        return self._ask("start", arguments)

    def step(self, command: str) -> str:
        """Play `command`. Returns the feedback. Raises EnvironmentFailure if the child breaks."""
        return self._ask("step", command[:MAX_COMMAND])

    def close(self) -> None:
        """End the child. The worker can be started again."""
        if self._child is not None:
            self._kill()
            self._child = None

    def _start_child(self) -> None:
        module_path = os.pathsep.join(filter(None, sys.path))
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, self.factory],
            bufsize=0,
            env=os.environ | {"PYTHONPATH": module_path},  # it imports what we would import
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        # A finalizer also runs when the interpreter exits.
        self._kill = weakref.finalize(self, _kill, self._child)

    def _ask(self, request: str, argument: Any) -> str:
        """Return the text with which the game answers a request, "start" or "step"."""
        if self._child is None:
            raise EnvironmentFailure(f"{request} without a running game")
        assert self._child.stdin is not None
        line = json.dumps({request: argument}).encode() + b"\n"
        with contextlib.suppress(OSError):  # a dead child is noticed when it does not reply
            self._child.stdin.write(line)
        reply = self._receive(request, self.timeout_s)
        self.admissible = reply.admissible
        self.won = reply.won
        return reply.text

    def _receive(self, request: str, timeout_s: float) -> ChildReply:
        """Return the child's reply to a request.

        Ends the child and raises EnvironmentFailure if there is none, or if it is an error.
        """
        line = self._read_line(request, timeout_s)
        try:
            reply = checked(ChildReply, line, f"answered {request}")
        except UserError as error:
            self._fail(str(error))
        if reply.error:
            self._fail(f"{request} raised {reply.error}")
        return reply

    def _read_line(self, request: str, timeout_s: float) -> bytes:
        child = self._child
        assert child is not None and child.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._fail(f"no answer to {request} within {timeout_s:g} s")
                chunk = os.read(child.stdout.fileno(), 1 << 16)
                if not chunk:
                    self._fail(f"{_ending(child)} during {request}")
                line += chunk
                if len(line) > MAX_REPLY_BYTES:
                    self._fail(f"answered {request} with more than {MAX_REPLY_BYTES} bytes")
        return bytes(line)

    def _fail(self, reason: str) -> NoReturn:
        self.close()
        raise EnvironmentFailure(f"worker {self.factory}: {reason}")


def _ending(child: subprocess.Popen) -> str:
    """Say how a child that has closed its output ended."""
    try:
        exit_code = child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "closed its output"
    return f"died of signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"


def _kill(child: subprocess.Popen) -> None:
    child.kill()
    with contextlib.suppress(OSError), child:  # leaving the context closes its pipes and waits
        pass


# ---- the child


def _serve(factory: str) -> None:
    """Run the child: answer requests until the input ends or the game raises."""
    # The terminal sends these to both processes; the parent handles them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    # Text that a game prints must not end up among the replies.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    void = os.open(os.devnull, os.O_RDWR)
    os.dup2(void, 0)
    os.dup2(void, 1)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")

    try:
        module, _, name = factory.partition(":")
        make = getattr(importlib.import_module(module), name)
        reply({})
        game: Any = None
        for line in requests:
            request = json.loads(line)
            if "start" in request:
                game = make(**request["start"])
                text = game.reset()
            else:
                text = game.step(request["step"])
            reply({"text": text, "admissible": game.admissible, "won": game.won})
    except BrokenPipeError:
        return
    except Exception as error:
        reply({"error": describe(error)})


def _watch_parent(parent: int) -> None:
    """End this process once its parent is gone.

    PR_SET_PDEATHSIG would end it too early, when the *thread* that started it ends.
    """
    while os.getppid() == parent:
        time.sleep(WATCHDOG_S)
    os._exit(1)


if __name__ == "__main__":
    _serve(sys.argv[1])
