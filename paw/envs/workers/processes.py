"""Environments in their own processes (env.processes). A process that dies or hangs ends its
episodes, never the run.

Tasks stay in the trainer. `make` and every method of an environment run in one of N workers, each
with a share of the environments (`paw.envs.workers.process`). A worker that ends, or does not
answer a call within env.step_timeout_s, is killed together with everything that it started. The
episodes of its environments fail, and another worker takes its place.
"""

import itertools
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from paw.config.sections import EnvConfig
from paw.envs.base import EnvFactory, Tasks
from paw.envs.workers.process import CLOSE_S, Answer, Start, Worker
from paw.errors import EnvironmentFailure, UserError
from paw.types import Outcome, Task

T = TypeVar("T")


class ProcessFactory(EnvFactory):
    """A factory whose environments run in env.processes workers. The workers end with the factory.

    Tasks are those of `factory`. A worker finds the environment by the name `target`. Raises
    UserError if the environments cannot be made.
    """

    may_block = True
    runs_others_code = False  # not in this process, and workers have their own time limits

    def __init__(self, factory: EnvFactory, config: EnvConfig, target: str) -> None:
        self.config = config
        self.has_others_tasks = getattr(factory, "has_others_tasks", False)
        self._factory = factory
        self._target = target
        self._count = config.processes
        self._timeout_s = config.step_timeout_s
        # If a text is too long, a worker returns one character more than allowed. The trainer cuts
        # and counts it.
        max_text = min(config.max_text + 1, 2**31 - 1)
        worker_config = config.model_copy(
            update={"name": target, "processes": 0, "max_text": max_text}
        )
        self._start = Start(worker_config.model_dump_json(), Path.cwd())
        self.name = factory.name
        self.reward_max = factory.reward_max
        self.invalid_penalty = factory.invalid_penalty
        self.distinct_eval = factory.distinct_eval
        self._replaced = 0
        self._numbers = itertools.count()
        self._opening = threading.Lock()
        self._workers = [self._new_worker()]
        weakref.finalize(self, _end, self._workers)
        try:
            self._demonstrates = self._workers[0].started.result().demonstrates
        except (EnvironmentFailure, TimeoutError) as error:
            raise UserError(
                f"env.processes = {self._count}: env.name = '{target}': {error}"
            ) from None

    @property
    def processes_lost(self) -> int:
        return self._replaced + sum(bool(worker.lost) for worker in self._workers)

    def tasks(self, split: str, seed: int) -> Tasks:
        if split == "warmup" and not self._demonstrates:
            raise UserError(
                f"env.name = '{self._target}' has no oracle(), which the quickstart's model "
                "imitates; set model.path"
            )
        return self._factory.tasks(split, seed)

    def make(self) -> "RemoteEnv":
        return RemoteEnv(self)

    def fingerprint(self) -> str:
        return self._factory.fingerprint()

    def _new_worker(self) -> Worker:
        at_once = max(1, self.config.threads // self._count)
        return Worker(self._start, self._timeout_s, at_once)

    def open(self) -> tuple[Worker, int]:
        """Make an environment in the worker with the fewest. Returns (worker, its number there)."""
        with self._opening:
            for i, worker in enumerate(self._workers):
                if worker.lost:
                    self._workers[i] = self._new_worker()
                    self._replaced += 1
            while len(self._workers) < self._count:  # they all start at the same time
                self._workers.append(self._new_worker())
            worker = min(self._workers, key=lambda worker: worker.environments)
            worker.environments += 1
            number = next(self._numbers)
        try:
            answer = worker.call("make", number)
        except BaseException:
            worker.environments -= 1
            raise
        worker.allow(answer)
        return worker, number


def _end(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.end()
    deadline = time.monotonic() + CLOSE_S
    for worker in workers:
        worker.wait(max(0.0, deadline - time.monotonic()))


class RemoteEnv:
    """An environment in a worker, with every member that an environment may have."""

    def __init__(self, factory: ProcessFactory) -> None:
        self._factory = factory
        self._open()
        self.tools: list[dict[str, Any]] = []
        self.task: str | None = None
        """The task in words, if the environment has one."""

    def reset(self, task: Task) -> str:
        if self._worker.lost:  # it was lost in an earlier episode
            self._open()
        answer = self._call("reset", task)
        self.tools = answer.tools or []
        self.task = answer.task
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
        return _response(self._call("oracle"))

    def admissible_actions(self) -> list[str]:
        return _present(self._call("admissible_actions").actions)

    def format_action(self, action: str) -> str:
        return _response(self._call("format_action", action))

    def close(self) -> None:
        if not self._worker.lost:
            self._call("close")

    def _open(self) -> None:
        self._worker, self._number = self._factory.open()
        weakref.finalize(self, self._worker.forget, self._number)

    def _call(self, method: str, *arguments: Any) -> Answer:
        return self._worker.call(method, self._number, *arguments)


def _response(answer: Answer) -> str:
    """Return the response of an oracle or `format_action`: a text, or a Reply with calls."""
    if answer.reply is not None:
        return answer.reply.to_reply()
    return _present(answer.text)


def _present(value: T | None) -> T:
    """Return `value` of an answer. Raises EnvironmentFailure if the worker left it out."""
    if value is None:
        raise EnvironmentFailure("its process left out a value that was asked for")
    return value
