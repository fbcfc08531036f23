"""The trainer's side of one process of env.processes: requests, answers and how it ends.

Requests are pickles, because a task's payload may be any Python object. Answers are plain data, one
JSON object per line, and are checked here. The process runs `paw.rollouts.env_process`.
"""

import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from paw.envs.checked import Strict, checked
from paw.errors import EnvironmentFailure, NoOracleError, UserError, describe
from paw.types import Outcome, Reply, ToolCall

WORKER = "paw.rollouts.env_process"
"""The module that a worker runs.

It belongs to a layer above this one, so it is not imported here.
"""
START_TIMEOUT_S = 300.0
"""Time limit for a worker to start, import the environment and load its data."""
CLOSE_S = 3.0
"""Time limit for workers to close their environments."""
TICK_S = 0.2
"""How often a silent worker is checked."""
MAX_ANSWER_BYTES = 1 << 26
NOT_SENT = (
    "env.processes: the arguments of {method}() cannot be sent to a process ({why}); make the "
    "payload of tasks plain data or objects of importable classes, or set env.processes = 0"
)


class OracleReply(Strict):
    """An oracle's `Reply`, as JSON."""

    text: str
    content: str
    calls: list[ToolCall]
    problem: str

    def to_reply(self) -> Reply:
        return Reply(self.text, self.content, self.calls, self.problem)


class Failure(Strict):
    """An exception that an environment raised."""

    kind: str
    """Name of the exception."""
    message: str
    ends_run: bool = False
    """Whether it is a UserError."""
    no_oracle: bool = False
    """Whether it is a NoOracleError."""


class Answer(Strict):
    """A worker's answer to the call `key`. The method decides which fields are set.

    The first answer has key 0 and says that the worker has started.
    """

    key: int
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    """A conversation, instead of a text."""
    reply: OracleReply | None = None
    actions: list[str] | None = None
    outcome: Outcome | None = None
    tools: list[dict[str, Any]] | None = None
    task: str | None = None
    """The task in words, if the environment has one."""
    demonstrates: bool = True
    """Whether the environments have an oracle."""
    blocks: bool = False
    """Whether the environments may block, so several calls at once make sense. In the first answer,
    and in those to `make`."""
    failure: Failure | None = None


@dataclass
class Call:
    """A call that a worker has not answered yet."""

    answer: Future[Answer]
    timeout_s: float
    deadline: float


@dataclass(frozen=True)
class Start:
    """What a worker needs to make the factory."""

    config: str
    """The section [env] as JSON."""
    folder: Path
    """The current folder when the factory was made. Paths are relative to it."""


class Worker:
    """One process with its share of the environments.

    A thread starts it, reads its answers, and ends it if it is silent. If that thread ends, the
    kernel ends the process.
    """

    def __init__(self, start: Start, timeout_s: float, at_once: int) -> None:
        self._start = start
        self._timeout_s = timeout_s
        self.environments = 0
        """Number of its environments."""
        self.lost = ""
        """How it ended; "" while it is running."""
        self._forgotten: deque[int] = deque()
        """Numbers of environments no longer in use."""
        self._keys = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._at_once = at_once
        """Simultaneous calls, once the environments are known to block."""
        self._blocks = False
        self._places = threading.Semaphore(1)
        self._socket, self._theirs = socket.socketpair()
        self._requests = Connection(os.dup(self._socket.fileno()), readable=False)
        self._process: subprocess.Popen[bytes] | None = None
        self.started = self._expect(0, max(START_TIMEOUT_S, timeout_s))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._send(start.config)

    def call(self, method: str, environment: int, *arguments: Any) -> Answer:
        """Call a method of the environment with that number.

        Raises the method's own exception, or TimeoutError or EnvironmentFailure if the process hung
        or ended.
        """
        try:
            pickled = bytes(ForkingPickler.dumps(arguments))
        except Exception as error:  # raised by pickle, or by a payload's own methods
            raise UserError(NOT_SENT.format(method=method, why=describe(error))) from None
        self.allow(self.started.result())
        with self._places:
            key = next(self._keys)
            answer = self._expect(key, self._timeout_s)
            forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
            self._send((key, method, environment, pickled, forgotten))
            return answer.result()

    def allow(self, answer: Answer) -> None:
        """Allow simultaneous calls if an answer says that the environments may block."""
        if self._blocks or not answer.blocks:
            return
        with self._lock:
            is_first = not self._blocks
            self._blocks = True
        if is_first and self._at_once > 1:
            self._places.release(self._at_once - 1)

    def forget(self, environment: int) -> None:
        """Note that an environment is no longer used. The next call tells the worker."""
        self._forgotten.append(environment)
        self.environments -= 1

    def end(self) -> None:
        """Ask it to close its environments and end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for it to end, then kill it."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._kill()
            self._thread.join(CLOSE_S)

    def _expect(self, key: int, timeout_s: float) -> Future[Answer]:
        """Return the future answer to call `key`, which is due within `timeout_s`.

        Raises EnvironmentFailure if the worker has ended.
        """
        call = Call(Future(), timeout_s, time.monotonic() + timeout_s)
        with self._lock:
            if self.lost:
                raise EnvironmentFailure(self.lost)
            self._calls[key] = call
        return call.answer

    def _send(self, message: Any) -> None:
        # If the process has ended, `_listen` notices it.
        with self._sending, suppress(OSError):
            self._requests.send(message)

    def _run(self) -> None:
        """Run the thread: start the process, read its answers, and clean up after it ends."""
        try:
            self._process = self._launch()
            reason = self._listen(self._process)
        except Exception as error:  # otherwise calls would wait forever
            reason = f"its process was abandoned: {describe(error)}"
        if self._process:
            self._kill()
            self._process.wait()
        with self._lock:
            self.lost = reason
            calls = list(self._calls.values())
        for call in calls:
            call.answer.set_exception(EnvironmentFailure(reason))
        with self._sending:
            self._requests.close()
        self._socket.close()

    def _launch(self) -> subprocess.Popen[bytes]:
        module_path = os.pathsep.join(filter(None, sys.path))
        with self._theirs:
            return subprocess.Popen(
                [sys.executable, "-m", WORKER, str(self._theirs.fileno()), str(os.getpid())],
                cwd=self._start.folder,
                env=os.environ | {"PYTHONPATH": module_path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[self._theirs.fileno()],
                # The terminal's signals do not reach it, and what it starts is killed with it.
                start_new_session=True,
            )

    def _listen(self, process: subprocess.Popen[bytes]) -> str:
        """Pass on its answers until it ends, is late or sends garbage. Returns the reason."""
        received = bytearray()
        last_check = time.monotonic()
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        while True:
            if readable.poll(TICK_S * 1000):
                chunk = self._socket.recv(1 << 16)
                if not chunk:
                    return _ending(process)
                received += chunk
                if b"\n" in chunk:
                    *lines, rest = bytes(received).split(b"\n")
                    received = bytearray(rest)
                    try:
                        for line in lines:
                            self._deliver(checked(Answer, line, "it answered"))
                    except UserError as error:
                        return f"its process was ended: {error}"
                if len(received) > MAX_ANSWER_BYTES:
                    return f"its process was ended: it answered more than {MAX_ANSWER_BYTES} bytes"
            elif _has_ended(process):  # a process that it forked may keep the connection open
                return _ending(process)

            now = time.monotonic()
            asleep = now - last_check - TICK_S
            last_check = now
            with self._lock:
                if asleep > 1.0:  # this process was stopped or busy, which does not count as late
                    for call in self._calls.values():
                        call.deadline += asleep
                late = {key: call for key, call in self._calls.items() if now > call.deadline}
                for key in late:
                    del self._calls[key]
            for call in late.values():
                call.answer.set_exception(TimeoutError(f"no answer within {call.timeout_s:g} s"))
            if late:
                return (
                    "another environment of its process gave no answer within "
                    f"{self._timeout_s:g} s"
                )

    def _deliver(self, answer: Answer) -> None:
        """Pass an answer to the call that waits for it. Raises UserError if there is none."""
        with self._lock:
            call = self._calls.pop(answer.key, None)
        if call is None:
            raise UserError("it answered a call that was never made")
        if answer.failure is None:
            call.answer.set_result(answer)
        else:
            call.answer.set_exception(_raised(answer.failure))

    def _kill(self) -> None:
        """Kill it, together with all processes that it has started."""
        if self._process and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended. Does not reap it, so its process id cannot be reused."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ending(process: subprocess.Popen[bytes]) -> str:
    """Say how a process that has ended or closed its connection did so."""
    deadline = time.monotonic() + CLOSE_S
    while not _has_ended(process):
        if time.monotonic() > deadline:
            return "its process closed the connection"
        time.sleep(0.01)
    status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    if status.si_code == os.CLD_EXITED:
        return f"its process ended with exit code {status.si_status}"
    return f"its process was killed by {signal.Signals(status.si_status).name}"


def _raised(failure: Failure) -> Exception:
    """Make the exception for a failure. Its name is the same, so messages are too."""
    if failure.ends_run:
        return UserError(failure.message)
    if failure.no_oracle:
        return NoOracleError(failure.message)
    name = failure.kind if failure.kind.isidentifier() else EnvironmentFailure.__name__
    return type(name, (EnvironmentFailure,), {})(failure.message)
