"""Applies patterns and schemas from data in a child process, with limits on CPU time and memory.

A regular expression that backtracks forever, or a JSON schema that refers to itself twice at every
level, never ends. `re` cannot be interrupted and holds the interpreter's lock meanwhile. The
library `regex` limits the time of matching but not of compiling, and reads some patterns
differently. So `re` and jsonschema do the work, in a child that the kernel ends at the limit. The
next call then starts another child.
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
"""Limit of a call in seconds of CPU time, a thousand times what a normal one takes.

Wall-clock time would depend on the load of the machine.
"""
WALL_S = 120.0
"""Seconds after which a child that is stopped or gets no CPU time is killed."""
CHILD = Path(__file__).with_name("limited_child.py")


class CannotApply(Exception):
    """A pattern or schema cannot be applied.

    The message is a sentence without its subject, such as "takes more than 1 s of CPU time".
    """


def fullmatch(pattern: str, text: str) -> bool:
    """Whether `pattern`, a regular expression of Python's `re`, matches all of `text`.

    Raises CannotApply if that exceeds a limit.
    """
    return _child.ask("fullmatch", pattern, text)


def pattern_problem(pattern: str) -> str:
    """Say why `pattern` is not a regular expression; "" if it is one."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        return clean(error)
    except RecursionError:
        return "it is nested too deeply"
    return ""


def arguments_problem(schema: dict[str, Any], arguments: Any) -> str:
    """Say why `arguments` do not fit a JSON schema; "" if they do. Raises CannotApply."""
    return _child.ask("arguments_problem", schema, arguments)


def schema_problem(schema: dict[str, Any]) -> str:
    """Say why `schema` is not a JSON schema or cannot be applied even to {}; "" if it can."""
    return _schema_problem(json.dumps(schema, sort_keys=True))


@lru_cache(256)
def _schema_problem(text: str) -> str:
    """`schema_problem` for JSON text, cached because the same schemas come with every episode."""
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
        """Return what `call` returns in the child.

        Raises CannotApply if that exceeds a limit or fails, and EnvironmentFailure if the child
        ends for another reason.
        """
        request = json.dumps({"call": call, "arguments": arguments}).encode() + b"\n"
        with self._lock:
            process = self._running()
            timer = threading.Timer(WALL_S, process.kill)
            timer.daemon = True
            timer.start()
            try:
                line = self._exchange(process, request)
            except BaseException:  # an abandoned thread leaves an answer unread
                self._end(process)
                raise
            finally:
                timer.cancel()
            if not line:
                raise self._failure(self._end(process))
        answer = json.loads(line)
        if "problem" in answer:
            raise CannotApply(answer["problem"])
        return answer["value"]

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the child, starting it if it is not running."""
        if self._process is None or self._process.poll() is not None:
            module_path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), str(CPU_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": module_path},  # it imports what we would import
            )
        return self._process

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
        """Return the line that answers a request; b"" if the child ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except OSError:
            return b""
        return process.stdout.readline()

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """End the child unless it has already ended. Returns its exit code."""
        self._process = None
        process.kill()
        with suppress(OSError), process:  # leaving the context closes the pipes and waits
            pass
        return process.wait()

    @staticmethod
    def _failure(code: int) -> Exception:
        """Return the exception for a child that ended with an exit code."""
        if code == -signal.SIGPROF:
            return CannotApply(f"takes more than {CPU_S:g} s of CPU time")
        if code == -signal.SIGSEGV:  # overflow of the C stack
            return CannotApply("is nested too deeply, or refers to itself")
        ending = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return EnvironmentFailure(f"the process that applies patterns and schemas ended {ending}")


_child = _Child()


def _forget() -> None:
    """Start another child after a fork, because two processes sharing one would mix up answers."""
    global _child
    _child = _Child()


os.register_at_fork(after_in_child=_forget)
