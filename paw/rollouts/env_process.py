"""A worker process of env.processes. It makes environments and calls their methods for the trainer.

`paw.envs.workers.process` is the trainer's side, and describes the messages between the two. This
process checks what an environment returns, as the trainer does without processes, and sends it as
one JSON object on a line.
"""

import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, fields
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

from paw.config import plugins
from paw.config.keys import section_type
from paw.config.sections import EnvConfig
from paw.envs.base import EnvFactory
from paw.envs.load import load_factory
from paw.envs.workers.process import CLOSE_S, MAX_ANSWER_BYTES, NOT_SENT
from paw.errors import (
    LINE_CHARS,
    EnvironmentFailure,
    NoOracleError,
    UserError,
    clean,
    describe,
    quietly,
)
from paw.processes.lifeline import die_with_parent, end_group_with_this, end_tool_servers
from paw.rollouts.guard import CheckedEnv
from paw.rundir.signals import STOPS
from paw.types import Outcome, Reply

Fields = dict[str, Any]
"""The fields of a `paw.envs.workers.process.Answer`."""


class Environments:
    """The environments of this process, each with a number."""

    def __init__(self, config: EnvConfig, send: Callable[[Fields], None]) -> None:
        self._config = config
        self._send = send
        self.factory = _make_factory(config)
        self._by_number: dict[int, CheckedEnv] = {}
        self._threads = ThreadPoolExecutor(config.threads)
        self.blocks = self.factory.may_block
        """Whether calls may block, so many of them run at once in threads."""

    def play(
        self, key: int, method: str, number: int, arguments: bytes, forgotten: list[int]
    ) -> None:
        """Answer a call: in a thread if environments block, otherwise here, one at a time.

        The trainer no longer uses the environments with the numbers in `forgotten`.
        """
        for forgotten_number in forgotten:
            self._by_number.pop(forgotten_number, None)
        if self.blocks:
            self._threads.submit(self._answer, key, method, number, arguments)
        else:
            self._answer(key, method, number, arguments)

    def close(self) -> None:
        for environment in list(self._by_number.values()):
            with quietly():
                environment.close()

    def _answer(self, key: int, method: str, number: int, arguments: bytes) -> None:
        try:
            answer = self._call(method, number, arguments)
        except BaseException as error:
            answer = _failure(error)
        self._send({"key": key, **answer})

    def _call(self, method: str, number: int, pickled: bytes) -> Fields:
        """Make an environment, or call a method of one. Returns the fields of the result.

        `pickled` contains the arguments.
        """
        try:
            arguments = pickle.loads(pickled)  # noqa: S301 (our own process sent it)
        except Exception as error:
            raise UserError(NOT_SENT.format(method=method, why=describe(error))) from None
        if method == "make":
            return self._make(number)

        environment = self._by_number[number]
        result = getattr(environment, method)(*arguments)
        match method:
            case "reset":
                return {"text": result, "tools": environment.tools, "task": _task_of(environment)}
            case "step":
                outcome = {field.name: getattr(result, field.name) for field in fields(Outcome)}
                return {"outcome": outcome, "task": _task_of(environment)}
            case "context":
                return {"text": result} if isinstance(result, str) else {"messages": result}
            case "admissible_actions":
                return {"actions": result}
            case "close":
                return {}
            case _:
                return (
                    {"reply": _reply_fields(result)}
                    if isinstance(result, Reply)
                    else {"text": result}
                )

    def _make(self, number: int) -> Fields:
        environment = CheckedEnv(self.factory.make(), self._config)
        self.blocks = self.blocks or environment.is_coroutine_env
        self._by_number[number] = environment
        return {"blocks": self.blocks}


def _failure(error: BaseException) -> Fields:
    ends_run = isinstance(error, UserError)
    failure = {
        "kind": type(error).__name__,
        "message": clean(error, LINE_CHARS if ends_run else 500),
        "ends_run": ends_run,
        "no_oracle": isinstance(error, NoOracleError),
    }
    return {"failure": failure}


def _make_factory(config: EnvConfig) -> EnvFactory:
    if config.name in plugins.ENVS:
        return plugins.load("envs", config.name)(config)
    return load_factory(None, config)


def _task_of(environment: CheckedEnv) -> str | None:
    """Return the task in words, if the environment has a member `task`."""
    with quietly():
        task = getattr(environment, "task", None)
        return str(task) if isinstance(task, str) else None
    return None


def _reply_fields(reply: Reply) -> Fields:
    calls = [asdict(tool_call) for tool_call in reply.calls]
    return {"text": str(reply), "content": reply.content, "calls": calls, "problem": reply.problem}


def _encode(answer: Fields) -> bytes:
    """Encode an answer as a line of JSON, or as a failure if it is not JSON or too long.

    Lone surrogates become question marks, because no reader of JSON accepts them.
    """
    try:
        line = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        if len(line) > MAX_ANSWER_BYTES:
            raise EnvironmentFailure(f"it returned more than {MAX_ANSWER_BYTES} bytes in total")
    except (EnvironmentFailure, TypeError, ValueError, RecursionError) as error:
        return json.dumps({"key": answer["key"], **_failure(error)}).encode() + b"\n"
    return line


def main(descriptor: int, trainer: int) -> NoReturn:
    """Answer the calls on the connection `descriptor`, until the trainer closes it or ends."""
    die_with_parent(trainer)
    end_group_with_this()
    os.set_inheritable(descriptor, False)
    # A terminal or launcher sends signals here too. They are meant for the trainer, which saves
    # first. Programs started here handle them as usual.
    for number in STOPS:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_restore_signals)
    requests = Connection(descriptor)
    sending = threading.Lock()

    def send(answer: Fields) -> None:
        line = _encode(answer)
        with sending:
            while line:
                written = os.write(descriptor, line)
                line = line[written:]

    environments = None
    with suppress(EOFError, OSError):  # the trainer has ended, or no longer needs this process
        environments = _start(requests.recv(), send)
        while environments:
            environments.play(*requests.recv())
    if environments:
        threading.Timer(CLOSE_S, os._exit, (1,)).start()
        environments.close()
    end_tool_servers()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def _start(section: str, send: Callable[[Fields], None]) -> Environments | None:
    """Make the environments of a section [env], given as JSON.

    If that fails, tells the trainer why and returns None.
    """
    try:
        kind = section_type(EnvConfig, json.loads(section)["name"])
        config = cast(EnvConfig, kind.model_validate_json(section))
        environments = Environments(config, send)
    except BaseException as error:
        send({"key": 0, **_failure(error)})
        return None
    demonstrates = getattr(environments.factory, "demonstrates", True)
    send({"key": 0, "demonstrates": demonstrates, "blocks": environments.blocks})
    return environments


def _restore_signals() -> None:
    for number in STOPS:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
