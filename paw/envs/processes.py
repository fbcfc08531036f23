"""Environments in processes of their own (env.processes): one that dies or hangs costs its episodes, never the run.

The trainer keeps the tasks. `make` and every method of an environment run in one of N workers, each of which has a
share of the environments (`paw.rollout.env_process`). A worker that ends, or leaves a call unanswered for
env.step_timeout_s, is killed with all that it has started; the episodes of its environments fail, and another one takes
its place.

What a worker says is plain data: one JSON object a line, checked here. It is told what to do in pickles, for a task's
payload may be any object of Python.
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
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

from paw.config import EnvConfig
from paw.envs.base import EnvFactory, Tasks
from paw.envs.checked import Strict, checked
from paw.errors import EnvironmentFailure, NoOracleError, UserError, describe
from paw.types import Outcome, Reply, Task, ToolCall

T = TypeVar("T")
WORKER = "paw.rollout.env_process"
"""The module that a worker runs. Its guard is above this package, so nothing of it is imported here."""
START_TIMEOUT_S = 300.0
"""Seconds for a worker to start, import the environment and load its data."""
CLOSE_S = 3.0
"""Seconds for workers to close their environments."""
TICK_S = 0.2
MAX_ANSWER_BYTES = 1 << 26
NOT_SENT = (
    "env.processes: what {method}() takes cannot be sent to a process ({why}): make the payload of tasks plain data or "
    "objects of classes that can be imported, or set env.processes = 0"
)
AT_ONCE = 64
"""Calls at once of environments that block, in all workers together."""


class Spoken(Strict):
    """A `Reply` of an oracle, as JSON."""

    text: str
    content: str
    calls: list[ToolCall]
    problem: str

    def reply(self) -> Reply:
        return Reply(self.text, self.content, self.calls, self.problem)


class Failure(Strict):
    """What an environment raised."""

    kind: str
    """Name of the exception."""
    message: str
    ends_run: bool = False
    """Whether it is a UserError."""
    no_oracle: bool = False
    """Whether it is a NoOracleError."""


class Answer(Strict):
    """What a worker says to the call `key`; which fields are set depends on the method. The first, key 0, says that the
    worker has started."""

    key: int
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    """A conversation, in place of a text."""
    spoken: Spoken | None = None
    actions: list[str] | None = None
    outcome: Outcome | None = None
    tools: list[dict[str, Any]] | None = None
    task: str | None = None
    """The task in words, of an environment that says it."""
    demonstrates: bool = True
    """Whether the environments have an oracle."""
    blocks: bool = False
    """Whether several calls at once make sense."""
    failure: Failure | None = None


@dataclass
class Call:
    """A question that a worker has not answered yet."""

    answer: Future[Answer]
    timeout_s: float
    deadline: float


@dataclass(frozen=True)
class Start:
    """What a worker needs to make the factory."""

    config: str
    """The section [env] as JSON."""
    folder: Path
    """The current folder when the factory was made: names of files count from there."""


class Worker:
    """One process with its share of the environments.

    A thread starts it, hears its answers, and ends it when it is silent; the kernel ends it with that thread.
    """

    def __init__(self, start: Start, timeout_s: float) -> None:
        self._start, self._timeout_s = start, timeout_s
        self.environments = 0
        """How many it has."""
        self.lost = ""
        """How it ended, "" while it runs."""
        self._forgotten: deque[int] = deque()
        """Numbers of environments that nobody has any more."""
        self._keys = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._at_once = 1
        self._places = threading.Semaphore(self._at_once)
        self._socket, self._theirs = socket.socketpair()
        self._requests = Connection(os.dup(self._socket.fileno()), readable=False)
        self._process: subprocess.Popen[bytes] | None = None
        self.started = self._expect(0, max(START_TIMEOUT_S, timeout_s))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._send(start.config)

    def call(self, method: str, environment: int, *arguments: Any) -> Answer:
        """Call a method of the environment of that number. Raises what it raised; TimeoutError or EnvironmentFailure if
        the process hung or ended."""
        try:
            given = bytes(ForkingPickler.dumps(arguments))
        except Exception as error:  # of pickle, or of a payload's own methods
            raise UserError(NOT_SENT.format(method=method, why=describe(error))) from None
        self.started.result()
        with self._places:
            key = next(self._keys)
            answer = self._expect(key, self._timeout_s)
            forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
            self._send((key, method, environment, given, forgotten))
            return answer.result()

    def allow(self, at_once: int) -> None:
        """Have up to that many calls at once."""
        with self._lock:
            more = max(0, at_once - self._at_once)
            self._at_once += more
        if more:
            self._places.release(more)

    def forget(self, environment: int) -> None:
        """Nobody has that environment any more."""
        self._forgotten.append(environment)
        self.environments -= 1

    def end(self) -> None:
        """Tell it to close its environments and to end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait(self, seconds: float) -> None:
        """Wait for its end for so long, then kill it."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._kill()
            self._thread.join(CLOSE_S)

    def _expect(self, key: int, timeout_s: float) -> Future[Answer]:
        call = Call(Future(), timeout_s, time.monotonic() + timeout_s)
        with self._lock:
            if self.lost:
                raise EnvironmentFailure(self.lost)
            self._calls[key] = call
        return call.answer

    def _send(self, message: Any) -> None:
        with self._sending, suppress(OSError):  # of a process that has ended, which `_listen` hears
            self._requests.send(message)

    def _run(self) -> None:
        try:
            self._process = self._launch()
            reason = self._listen(self._process)
        except Exception as error:  # nobody must wait for ever
            reason = f"its process was given up: {describe(error)}"
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
        with self._theirs:
            return subprocess.Popen(
                [sys.executable, "-m", WORKER, str(self._theirs.fileno()), str(os.getpid())],
                cwd=self._start.folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[self._theirs.fileno()],
                start_new_session=True,  # signals of the terminal are the trainer's; what it starts is killed with it
            )

    def _listen(self, process: subprocess.Popen[bytes]) -> str:
        """Pass its answers on until it ends, is late or says nonsense; returns which."""
        received = bytearray()
        looked = time.monotonic()
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
                            self._hear(checked(Answer, line, "it answered"))
                    except UserError as error:
                        return f"its process was ended: {error}"
                if len(received) > MAX_ANSWER_BYTES:
                    return f"its process was ended: it answered more than {MAX_ANSWER_BYTES} bytes"
            elif _has_ended(process):  # something that it has forked may hold the connection open
                return _ending(process)

            now = time.monotonic()
            asleep = now - looked - TICK_S
            looked = now
            with self._lock:
                if asleep > 1.0:  # this process was stopped, or busy: nobody was late meanwhile
                    for call in self._calls.values():
                        call.deadline += asleep
                late = {key: call for key, call in self._calls.items() if now > call.deadline}
                for key in late:
                    del self._calls[key]
            for call in late.values():
                call.answer.set_exception(TimeoutError(f"no answer within {call.timeout_s:g} s"))
            if late:
                return f"another environment of its process gave no answer within {self._timeout_s:g} s"

    def _hear(self, answer: Answer) -> None:
        with self._lock:
            call = self._calls.pop(answer.key, None)
        if call is None:
            raise UserError("it answered what nobody had asked")
        if answer.failure is None:
            call.answer.set_result(answer)
        else:
            call.answer.set_exception(_raised(answer.failure))

    def _kill(self) -> None:
        """With all that it has started."""
        if self._process and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Its number stays its own: it is not reaped."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ending(process: subprocess.Popen[bytes]) -> str:
    """How a process ended that has closed its connection, or is gone."""
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
    """What an environment raised, as what the trainer raises: of the same name, so that it reads as in a thread."""
    if failure.ends_run:
        return UserError(failure.message)
    if failure.no_oracle:
        return NoOracleError(failure.message)
    name = failure.kind if failure.kind.isidentifier() else EnvironmentFailure.__name__
    return type(name, (EnvironmentFailure,), {})(failure.message)


class ProcessFactory(EnvFactory):
    """A factory whose environments run in env.processes workers, which end with it. UserError if they cannot be made.

    Tasks are those of `factory`; a worker finds the environment by the name `target`.
    """

    may_block = True
    runs_others_code = False  # in this process; workers have time limits of their own

    def __init__(self, factory: EnvFactory, config: EnvConfig, target: str) -> None:
        self._factory, self._target = factory, target
        self._count, self._timeout_s = config.processes, config.step_timeout_s
        # Of a text that is too long one more character comes back: it is cut, and counted, here.
        own = {"name": target, "processes": 0, "max_text": min(config.max_text + 1, 2**31 - 1)}
        self._start = Start(config.model_copy(update=own).model_dump_json(), Path.cwd())
        self.name = factory.name
        self.reward_max = factory.reward_max
        self.invalid_penalty = factory.invalid_penalty
        self.distinct_eval = factory.distinct_eval
        self._replaced = 0
        self._numbers = itertools.count()
        self._opening = threading.Lock()
        self._workers = [Worker(self._start, self._timeout_s)]
        weakref.finalize(self, _end, self._workers)
        try:
            self._demonstrates = self._workers[0].started.result().demonstrates
        except (EnvironmentFailure, TimeoutError) as error:
            raise UserError(f"env.processes = {self._count}: env.name = '{target}': {error}") from None

    @property
    def processes_lost(self) -> int:
        return self._replaced + sum(bool(worker.lost) for worker in self._workers)

    def tasks(self, split: str, seed: int) -> Tasks:
        if split == "warmup" and not self._demonstrates:
            why = "has no oracle(), which the quickstart's model imitates; set model.path"
            raise UserError(f"env.name = '{self._target}' {why}")
        return self._factory.tasks(split, seed)

    def make(self) -> "RemoteEnv":
        return RemoteEnv(self)

    def fingerprint(self) -> str:
        return self._factory.fingerprint()

    def open(self) -> tuple[Worker, int]:
        """Make an environment in the worker that has the fewest: (worker, number of the environment)."""
        with self._opening:
            lost = [place for place, worker in enumerate(self._workers) if worker.lost]
            self._replaced += len(lost)
            for place in lost:
                self._workers[place] = Worker(self._start, self._timeout_s)
            while len(self._workers) < self._count:  # which start at the same time
                self._workers.append(Worker(self._start, self._timeout_s))
            worker = min(self._workers, key=lambda worker: worker.environments)
            worker.environments += 1
            number = next(self._numbers)
        try:
            answer = worker.call("make", number)
        except BaseException:
            worker.environments -= 1
            raise
        if answer.blocks:
            worker.allow(max(1, AT_ONCE // self._count))
        return worker, number


def _end(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.end()
    deadline = time.monotonic() + CLOSE_S
    for worker in workers:
        worker.wait(max(0.0, deadline - time.monotonic()))


class RemoteEnv:
    """An environment in a worker, with every member that one may have."""

    def __init__(self, factory: ProcessFactory) -> None:
        self._factory = factory
        self._open()
        self.tools: list[dict[str, Any]] = []
        self.task: str | None = None
        """The task in words, if the environment says it."""

    def reset(self, task: Task) -> str:
        if self._worker.lost:  # since the last episode, which costs no other
            self._open()
        answer = self._call("reset", task)
        self.tools, self.task = answer.tools or [], answer.task
        return _present(answer.text)

    def context(self) -> str | list[dict[str, Any]]:
        answer = self._call("context")
        return _present(answer.text) if answer.messages is None else answer.messages

    def anchor(self) -> str:
        return _present(self._call("anchor").text)

    def step(self, response: str) -> Outcome:
        answer = self._call("step", response)
        self.task = answer.task
        return _present(answer.outcome)

    def oracle(self) -> str:
        answer = self._call("oracle")
        return _present(answer.text) if answer.spoken is None else answer.spoken.reply()

    def admissible_actions(self) -> list[str]:
        return _present(self._call("admissible_actions").actions)

    def format_action(self, action: str) -> str:
        answer = self._call("format_action", action)
        return _present(answer.text) if answer.spoken is None else answer.spoken.reply()

    def close(self) -> None:
        if not self._worker.lost:
            self._call("close")

    def _open(self) -> None:
        self._worker, self._number = self._factory.open()
        weakref.finalize(self, self._worker.forget, self._number)

    def _call(self, method: str, *arguments: Any) -> Answer:
        return self._worker.call(method, self._number, *arguments)


def _present(value: T | None) -> T:
    if value is None:
        raise EnvironmentFailure("its process answered without what was asked for")
    return value
