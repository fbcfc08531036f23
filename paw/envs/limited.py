"""Patterns and schemas that data brings, applied by a child process within limits of CPU time and memory.

A regular expression that backtracks for ever, or a JSON schema that refers to itself twice at every
level, never comes to an end. `re` cannot be interrupted and holds the interpreter's lock meanwhile;
the library `regex` limits the time of a match, not that of compiling, and reads some patterns
otherwise than `re` does. So `re` and jsonschema themselves do the work in a child, which the kernel
ends at the limit; the next call starts another.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from paw.errors import EnvironmentFailure, clean

CPU_S = 1.0
"""CPU seconds of a call: a thousand times what a sane one takes.

Seconds of the clock would depend on the machine.
"""
WALL_S = 120.0
"""Seconds until a child is given up that was stopped, or gets no processor."""
CHILD = Path(__file__).with_name("limited_child.py")


class CannotApply(Exception):
    """A pattern or schema cannot be applied; the message is a verb and the rest: "takes more than 1 s of CPU time"."""


def fullmatch(pattern: str, text: str) -> bool:
    """Whether `pattern`, a regular expression of Python's `re`, matches all of `text`.

    Raises CannotApply.
    """
    return _child.ask("fullmatch", pattern, text)


def pattern_problem(pattern: str) -> str:
    """Why `pattern` is no regular expression; "" if it is one."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        return clean(error)
    except RecursionError:
        return "it is nested too deeply"
    return ""


def arguments_problem(schema: dict[str, Any], arguments: Any) -> str:
    """What of `arguments` does not fit a JSON schema; "" if all does. Raises CannotApply."""
    return _child.ask("arguments_problem", schema, arguments)


def schema_problem(schema: dict[str, Any]) -> str:
    """Why `schema` is no JSON schema, or one that cannot be applied even to {}; "" if it can."""
    return _schema_problem(json.dumps(schema, sort_keys=True))


@lru_cache(256)
def _schema_problem(text: str) -> str:
    """The same schemas come with every episode."""
    schema = json.loads(text)
    try:
        problem = _child.ask("schema_problem", schema)
        if not problem:
            _child.ask("arguments_problem", schema, {})
    except CannotApply as error:
        return f"it {error}"
    return problem


class _Child:
    """The process, started by the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, call: str, *arguments: Any) -> Any:
        """What `call` returns there.

        Raises CannotApply, or EnvironmentFailure if the child cannot be had.
        """
        request = json.dumps({"call": call, "arguments": arguments}).encode() + b"\n"
        with self._lock:
            process = self._running()
            late = threading.Timer(WALL_S, process.kill)
            late.daemon = True
            late.start()
            try:
                line = self._exchange(process, request)
            except BaseException:  # a thread that is given up leaves an answer unread
                self._end(process)
                raise
            finally:
                late.cancel()
            if not line:
                raise self._why(self._end(process))
        answer = json.loads(line)
        if "problem" in answer:
            raise CannotApply(answer["problem"])
        return answer["value"]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            env = os.environ | {
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
            }  # imports as here
            command = [sys.executable, "-P", str(CHILD), str(CPU_S)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=env,
            )
        return self._process

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
        """The answer's line; b"" if the child ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except OSError:
            return b""
        return process.stdout.readline()

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """End the child, if it has not ended itself; returns its exit code."""
        self._process = None
        process.kill()
        with suppress(OSError), process:  # which closes the pipes, and waits
            pass
        return process.wait()

    @staticmethod
    def _why(code: int) -> Exception:
        if code == -signal.SIGPROF:
            return CannotApply(f"takes more than {CPU_S:g} s of CPU time")
        if code == -signal.SIGSEGV:  # the C stack
            return CannotApply("is nested too deeply, or refers to itself")
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return EnvironmentFailure(f"the process that applies patterns and schemas ended {how}")


_child = _Child()


def _forget() -> None:
    """The child is the parent's alone: two processes that ask it would read each other's answers."""
    global _child
    _child = _Child()


os.register_at_fork(after_in_child=_forget)
