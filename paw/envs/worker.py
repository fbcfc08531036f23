"""A text game in a child process: whatever goes wrong there costs one episode, never the run.

Needed for TextWorld, whose C library holds one game a process and calls exit() on bad input. Parent
and child exchange one JSON object a line over pipes, request and reply in turn:

    {"start": {"path": ...}}  ->  {"text": ..., "admissible": [...], "won": false}      or {"error": "..."}
    {"step": "look"}          ->  {"text": ..., "admissible": [...], "won": false}      or {"error": "..."}

The child holds a game made by `factory(**start)`, an object with `reset()`, `step(command)`,
`admissible` and `won`. What it prints goes nowhere. It ends with its parent: at the end of its
input, or, stuck in a game, when its watchdog sees that it was orphaned.
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
from typing import Any, NoReturn

from paw.envs.checked import Strict, checked
from paw.errors import EnvironmentFailure, UserError, describe

START_TIMEOUT_S = 120.0
"""Seconds for a child to start and import its game, which a busy machine can make slow."""
MAX_REPLY_BYTES = 1 << 20
MAX_COMMAND = 4096
"""Characters of a command that are sent; no game has one as long. Keeps a request well within a
pipe's buffer, so that writing it cannot block."""
WATCHDOG_S = 1.0


class Reply(Strict):
    text: str = ""
    admissible: list[str] = []
    won: bool = False
    error: str = ""


class Worker:
    """A game in a child process, with the interface of the game itself; the child is kept from episode to episode.

    `factory` is "module:name" of what makes the game, imported in the child; `timeout_s` bounds
    each call.
    """

    admissible: list[str]
    won: bool

    def __init__(self, factory: str, *, timeout_s: float) -> None:
        self.factory, self.timeout_s = factory, timeout_s
        self._child: subprocess.Popen | None = None

    def start(self, **arguments: Any) -> str:
        """Make a new game from JSON-able `arguments`; returns its first text.

        EnvironmentFailure: the child broke.
        """
        if self._child is None:
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.DEVNULL,
            }
            env = os.environ | {
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
            }  # imports as here
            command = [sys.executable, "-m", __name__, self.factory]
            self._child = subprocess.Popen(command, bufsize=0, env=env, **pipes)
            self._kill = weakref.finalize(
                self, _kill, self._child
            )  # also at exit of the interpreter
            self._receive("start", START_TIMEOUT_S)
        return self._ask("start", arguments)

    def step(self, command: str) -> str:
        """Play `command`; returns the feedback. Raises EnvironmentFailure as `start` does."""
        return self._ask("step", command[:MAX_COMMAND])

    def close(self) -> None:
        """End the child. The worker can be started again."""
        if self._child is not None:
            self._kill()
            self._child = None

    def _ask(self, what: str, argument: Any) -> str:
        if self._child is None:
            raise EnvironmentFailure(f"{what} without a running game")
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # a dead child is named when its reply is missing
            self._child.stdin.write(json.dumps({what: argument}).encode() + b"\n")
        reply = self._receive(what, self.timeout_s)
        self.admissible, self.won = reply.admissible, reply.won
        return reply.text

    def _receive(self, what: str, timeout_s: float) -> Reply:
        """The next line of the child.

        Failing that, ends the child and raises EnvironmentFailure.
        """
        child = self._child
        assert child is not None and child.stdout is not None
        deadline, received = time.monotonic() + timeout_s, bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._fail(f"no answer to {what} within {timeout_s:g} s")
                chunk = os.read(child.stdout.fileno(), 1 << 16)
                received += chunk
                if not chunk:
                    self._fail(f"{_ending(child)} during {what}")
                if len(received) > MAX_REPLY_BYTES:
                    self._fail(f"answered {what} with more than {MAX_REPLY_BYTES} bytes")
        try:
            reply = checked(Reply, bytes(received), f"answered {what}")
        except UserError as error:
            self._fail(str(error))
        if reply.error:
            self._fail(f"{what} raised {reply.error}")
        return reply

    def _fail(self, reason: str) -> NoReturn:
        self.close()
        raise EnvironmentFailure(f"worker {self.factory}: {reason}")


def _ending(child: subprocess.Popen) -> str:
    try:
        code = child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "closed its output"
    return f"died of signal {-code}" if code < 0 else f"exited with code {code}"


def _kill(child: subprocess.Popen) -> None:
    child.kill()
    with contextlib.suppress(OSError), child:  # which closes its pipes, and waits
        pass


# ---- the child


def _serve(factory: str) -> None:
    for number in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # of the terminal: they are the parent's to handle
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    void = os.open(os.devnull, os.O_RDWR)
    os.dup2(void, 0)
    os.dup2(void, 1)  # a game that prints must not write into the replies

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


def _watch(parent: int) -> None:
    """End this process once its parent is gone.

    PR_SET_PDEATHSIG would do so when the *thread* that made it ends.
    """
    while os.getppid() == parent:
        time.sleep(WATCHDOG_S)
    os._exit(1)


if __name__ == "__main__":
    _serve(sys.argv[1])
