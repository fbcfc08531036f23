"""Coroutine environments, whose methods are awaited on the event loop that all episodes share.

Thousands of them can wait at the same time without needing a thread each. A call that takes too
long is cancelled, and if it raises an error, only its episode fails. A call that blocks the loop
instead of awaiting stalls all episodes, so a warning names the first one.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, NamedTuple

from paw.errors import EnvironmentFailure, describe, to_stderr
from paw.io.threads import Threads
from paw.rollouts.guard import CheckedEnv
from paw.rollouts.loop import EpisodeLoop, ThreadUsage
from paw.types import Outcome, Task

BLOCKED_S = 0.25
"""Seconds for which a call may hold the event loop before it counts as blocking."""
MAY_BLOCK = ("reset", "step", "close")
"""Methods that run in a thread if they are plain functions. The others are expected to be quick."""
GRACE_S = 0.5
"""Seconds that a cancelled call is given to end before its environment is closed."""
LAST_ROUNDS = 3
"""Rounds of the loop after the time limit in which an answer that has arrived is still accepted."""


class CoroutineEnv:
    """The methods of a coroutine environment, with checked results, for the running loop."""

    def __init__(self, environment: CheckedEnv, threads: Threads) -> None:
        self.checked = environment
        self._environment = environment.environment
        self._threads = threads
        self._in_threads = set()
        for name in MAY_BLOCK:
            method = getattr(self._environment, name, None)
            if method is not None and not inspect.iscoroutinefunction(method):
                self._in_threads.add(name)
        self.method = ""
        """The method that runs."""

    @property
    def name(self) -> str:
        return type(self._environment).__name__

    async def reset(self, task: Task) -> str:
        return self.checked.checked_start(await self._call("reset", task))

    async def context(self) -> str | list[dict[str, Any]]:
        return self.checked.checked_context(await self._call("context"))

    async def anchor(self) -> str:
        last_observation = self.checked.last_observation
        return self.checked.checked_anchor(await self._call("anchor", default=last_observation))

    async def step(self, response: str) -> Outcome:
        response = self.checked.checked_response(response)
        return self.checked.checked_outcome(await self._call("step", response))

    async def admissible_actions(self) -> list[str]:
        return self.checked.checked_actions(await self._call("admissible_actions", default=[]))

    async def format_action(self, action: str) -> str:
        response = await self._call("format_action", action, default=action)
        return self.checked.checked_action(response)

    async def close(self) -> None:
        """Close the environment, unless it is closed already."""
        if not self.checked.is_closed:
            self.checked.is_closed = True
            await self._call("close")

    async def _call(self, name: str, *args: Any, default: Any = None) -> Any:
        """Return the method's result, or `default` if there is no such method."""
        method = getattr(self._environment, name, None)
        if method is None:
            return default
        self.method = name
        if name in self._in_threads:
            result = await self._threads.run(method, *args)
        else:
            result = method(*args)
        if inspect.isawaitable(result):
            result = await result
        return result


Answer = asyncio.Future[tuple[Any, BaseException | None]]
"""What a call returned, and what it raised."""


class OpenCall(NamedTuple):
    answer: Answer
    deadline: float
    """On the loop's patient clock."""


class LoopCalls:
    """Calls on the event loop, each for at most `timeout_s` seconds."""

    def __init__(self, loop: EpisodeLoop, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._blocking_is_reported = False
        self._open: dict[asyncio.Task[Any], OpenCall] = {}
        """Calls that have not ended, including those that were given up, in order of deadline."""
        self._timer: asyncio.TimerHandle | None = None
        """Fires at the first deadline; None while no call waits."""

    async def run(self, environment: CoroutineEnv, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return or raise what a call of the environment returns or raises.

        A call that takes longer than the limit is cancelled, and this raises TimeoutError. It does
        not wait for the call, whose code may ignore cancellation. If this is cancelled, so is the
        call.
        """
        task, answer = self._start(environment, call)
        environment.checked.last_call = task
        try:
            value, error = await answer
        finally:
            if not task.done():
                task.cancel()
        if error is not None:
            raise error
        return value

    async def close(self, environment: CoroutineEnv) -> None:
        """Close an environment once its last call has ended, whatever it raises or cancels.

        Returns by the time limit at the latest.
        """
        last_call = environment.checked.last_call
        if last_call and not last_call.done():
            # The environment may cancel its own episode's tasks, including the one that runs this.
            with suppress(asyncio.CancelledError):
                await asyncio.wait([last_call], timeout=GRACE_S)
        task, answer = self._start(environment, environment.close)
        while not answer.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([answer])
        if not task.done():
            task.cancel()

    async def settle(self, timeout_s: float) -> None:
        """Cancel the calls that have not ended, and wait up to `timeout_s` for them to end."""
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    @property
    def are_open(self) -> bool:
        """Whether there are calls that have not ended."""
        return bool(self._open)

    def _start(
        self, environment: CoroutineEnv, call: Callable[[], Awaitable[Any]]
    ) -> tuple[asyncio.Task[Any], Answer]:
        task = self._loop.create_task(
            TimedCoroutine(_outcome(call), environment, self._loop, self._report_blocking)
        )
        answer: Answer = self._loop.create_future()
        self._open[task] = OpenCall(answer, self._loop.patient_time() + self._timeout_s)
        task.add_done_callback(self._end)
        if self._timer is None:
            self._timer = self._loop.call_later(
                self._timeout_s, self._give_up_late_calls, LAST_ROUNDS
            )
        return task, answer

    def _end(self, task: asyncio.Task[Any]) -> None:
        """Pass on how a call ended, unless it was given up."""
        answer = self._open.pop(task).answer
        if answer.done():
            return
        if task.cancelled():
            answer.set_result((None, EnvironmentFailure("CancelledError")))
        elif error := task.exception():
            answer.set_result((None, error))
        else:
            answer.set_result(task.result())

    def _give_up_late_calls(self, rounds: int) -> None:
        """Give up the calls whose time is up, after `rounds` more rounds of the loop.

        Time in which something else holds the loop does not count, and an answer that has arrived
        by then is accepted.
        """
        if rounds:
            self._loop.call_soon(self._give_up_late_calls, rounds - 1)
            return
        self._timer = None
        now = self._loop.patient_time()
        for call in self._open.values():
            if call.answer.done():
                continue
            if call.deadline > now:
                self._timer = self._loop.call_later(
                    call.deadline - now, self._give_up_late_calls, LAST_ROUNDS
                )
                return
            reason = f"no answer within {self._timeout_s:g} s"
            call.answer.set_result((None, TimeoutError(reason)))

    def _report_blocking(self, environment: CoroutineEnv, seconds: float) -> None:
        if self._blocking_is_reported:
            return
        self._blocking_is_reported = True
        to_stderr(
            f"{environment.name}.{environment.method}() blocked the event loop for {seconds:.2g} s,"
            " and all episodes with it: await what it waits for (asyncio.sleep, an async client,"
            " asyncio.to_thread), or make it a plain function, which runs in a thread (reported"
            " once)"
        )


class TimedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine that reports if it holds the loop for longer than BLOCKED_S."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        environment: CoroutineEnv,
        loop: EpisodeLoop,
        report: Callable[[CoroutineEnv, float], None],
    ) -> None:
        self._coroutine = coroutine
        self._environment = environment
        self._loop = loop
        self._report = report

    def send(self, value: Any) -> Any:
        started = self._loop.code_time()
        usage = ThreadUsage.now()
        try:
            return self._coroutine.send(value)
        finally:
            self._check(started, usage)

    def throw(self, *error: Any) -> Any:
        started = self._loop.code_time()
        usage = ThreadUsage.now()
        try:
            return self._coroutine.throw(*error)
        finally:
            self._check(started, usage)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def _check(self, started: float, usage: ThreadUsage) -> None:
        seconds = self._loop.code_time() - started
        if seconds > BLOCKED_S and not usage.was_starved(seconds):
            self._report(self._environment, seconds)


async def _outcome(call: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    """Return (what a call returned, what it raised).

    What it raised is not raised here, because SystemExit in a task would stop the loop.
    """
    try:
        return await call(), None
    except asyncio.CancelledError as error:  # the episode itself would appear to be cancelled
        return None, EnvironmentFailure(describe(error))
    except BaseException as error:
        return None, error
