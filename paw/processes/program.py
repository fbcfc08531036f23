"""Runs a user's program on an event loop, with limits on its time and its output.

It and everything that it starts end with it, and with this process (Linux), even after kill -9.
"""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from paw.processes import lifeline

MAX_OUTPUT = 16 << 20
"""Maximum bytes that a program may write to standard output and error together."""
TAIL = 64 << 10
"""Number of bytes kept from the end of an output."""
READ_BYTES = 64 << 10
END_S = 2.0
"""Time limit for reading the output of a program that has ended."""


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended."""

    problem: str
    """Why it was ended, or its exit code if that is not 0, in a few words; "" otherwise."""
    last_line: str
    """The last line of its standard output that is not empty."""
    last_error: str
    """The last line of its standard error that is not empty."""


async def run_program(
    words: Sequence[str],
    *,
    variables: Mapping[str, str],
    stdin: str,
    timeout_s: float,
    interrupt: asyncio.Future[None],
) -> ProgramEnd:
    """Run the command `words` in the current folder, until it ends or a limit is reached.

    `variables` are its environment, and `stdin` is what it can read. Raises the exception of
    `interrupt` as soon as that is set, and OSError if no process can be started. Whatever happens,
    no process of its group is left, and soon none that has left the group with its variables.
    """
    process = _start(words, variables=variables, stdin=stdin)
    assert process.stdout is not None and process.stderr is not None
    budget = OutputBudget()
    output = OutputTail(process.stdout, budget)
    errors = OutputTail(process.stderr, budget)
    exited = asyncio.ensure_future(asyncio.to_thread(process.wait))
    problem = ""
    try:
        await asyncio.wait(
            {exited, budget.exceeded, interrupt},
            timeout=timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if interrupt.done():
            interrupt.result()
        if budget.exceeded.done():
            problem = f"it wrote more than {MAX_OUTPUT >> 20} MiB"
        elif not exited.done():
            problem = f"it did not end within {timeout_s:g} s"
        _kill(process.pid)
        exit_code = await exited
        await asyncio.wait({output.ended, errors.ended}, timeout=END_S)
    finally:
        _kill(process.pid)
        output.close()
        errors.close()
    if exit_code and not problem:
        problem = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return ProgramEnd(problem, last_line=output.last_line(), last_error=errors.last_line())


def _start(
    words: Sequence[str], *, variables: Mapping[str, str], stdin: str
) -> "subprocess.Popen[bytes]":
    """Start a command in its own process group, which ends with this process."""
    with tempfile.TemporaryFile() as task_file:
        task_file.write(stdin.encode("utf-8", "replace"))
        task_file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid()), *words],
            stdin=task_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**variables, lifeline.MARK: secrets.token_hex(16)},
            start_new_session=True,
            bufsize=0,
        )


def _kill(group: int) -> None:
    """Kill what is left of a process group, even if its leader has ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class OutputBudget:
    """Counts what a program writes."""

    def __init__(self) -> None:
        self.exceeded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once it has written more than MAX_OUTPUT bytes."""
        self._bytes = 0

    def add(self, count: int) -> None:
        self._bytes += count
        if self._bytes > MAX_OUTPUT and not self.exceeded.done():
            self.exceeded.set_result(None)


class OutputTail:
    """Reads a pipe on the running loop and keeps the end of its content."""

    def __init__(self, pipe: IO[bytes], budget: OutputBudget) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done at the end of the pipe."""
        self._pipe = pipe
        self._budget = budget
        self._tail = bytearray()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def last_line(self) -> str:
        """Return the last line that is not empty; "" without one."""
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def close(self) -> None:
        """Read no more."""
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
        if not self.ended.done():
            self.ended.set_result(None)

    def _read(self) -> None:
        try:
            received = os.read(self._pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        self._tail += received
        del self._tail[:-TAIL]
        self._budget.add(len(received))
        if not received:
            self.close()
