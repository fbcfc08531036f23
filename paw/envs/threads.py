"""Calls in threads, each with a deadline: code that hangs costs its caller one call.

Python cannot end a thread. One that outlasts its deadline is given up, and another takes its place.
All are daemons, so the interpreter ends without waiting for them.
"""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

from paw.errors import EnvironmentFailure, UserError, describe

MAX_LOST = 100
"""Threads that hang at once; one more ends the run: each holds memory, and maybe a processor."""
DAY_S = 86400.0


class Threads:
    """At most `count` calls at once (0: in the caller's own thread), each of at most `timeout_s` seconds (None: any).

    TimeoutError beyond the deadline, UserError once more than MAX_LOST threads hang.
    """

    def __init__(self, count: int, timeout_s: float | None = None) -> None:
        self.count, self.timeout_s = count, timeout_s
        self.given_up = 0
        """Calls that outlasted the deadline."""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._workers = self._open = 0
        self._lost: list[threading.Thread] = []

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        call = self._submit(function, *args)
        while left := self._left(call):
            wait([call], left)
        return self._answer(call)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """`call`, while the loop goes on."""
        call = self._submit(function, *args)
        while left := self._left(call):
            await asyncio.wait([asyncio.wrap_future(call)], timeout=left)
        return self._answer(call)

    def close(self, *last: Callable[[], Any]) -> None:
        """End the threads after the `last` calls, whatever those raise.

        None waits longer than the deadline.
        """
        wait([self._submit(function) for function in last], self.timeout_s)
        for _ in range(self._workers):
            self._calls.put(None)
        self._calls, self._workers, self._open = SimpleQueue(), 0, 0

    def _submit(self, function: Callable[..., Any], *args: Any) -> "_Call":
        call = _Call(function, *args)
        self._open += 1
        if self.count:
            self._calls.put(call)
            self._hire()
        else:
            call.make()
        return call

    def _hire(self) -> None:
        while self._workers < min(self.count, self._open):
            self._workers += 1
            threading.Thread(target=_work, args=(self._calls,), daemon=True).start()

    def _left(self, call: "_Call") -> float:
        """Seconds until the call is late; 0 where it has ended."""
        since = time.monotonic() - call.began if call.thread else 0.0
        return 0.0 if call.done() else max(0.0, (self.timeout_s or DAY_S) - since)

    def _answer(self, call: "_Call") -> Any:
        self._open -= 1
        if not call.cancel():
            value, error = call.result()
            if error is not None:
                raise error
            return value
        assert call.thread
        # One that runs Python code ends by this; one that waits in C does when it returns.
        number = ctypes.c_ulong(call.thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))
        self.given_up += 1
        self._lost = [lost for lost in (*self._lost, call.thread) if lost.is_alive()]
        self._workers -= 1
        self._hire()
        if len(self._lost) <= MAX_LOST:
            raise TimeoutError(f"no answer within {self.timeout_s:g} s")
        raise UserError(
            f"stopped: {len(self._lost)} threads hang in calls that took longer than env.step_timeout_s = "
            f"{self.timeout_s:g}; give what the environment waits for a time limit of its own"
        )


class Daemons(ThreadPoolExecutor):
    """For `asyncio.to_thread`: a thread for each call, for which neither another call nor the interpreter waits."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args, **named))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future


class _Call(Future[tuple[Any, BaseException | None]]):
    """What it returned, and what it raised. Who gives it up cancels it."""

    began, thread = 0.0, None

    def __init__(self, *call: Any) -> None:
        super().__init__()
        self.call = call

    def make(self) -> bool:
        """Whether it was in time."""
        self.began, self.thread = time.monotonic(), threading.current_thread()
        function, *args = self.call
        try:
            answer = function(*args), None
        except (
            StopIteration,
            asyncio.CancelledError,
        ) as error:  # of a coroutine these say other things
            answer = None, EnvironmentFailure(describe(error))
        except BaseException as error:
            answer = None, error
        try:
            self.set_result(answer)
        except InvalidStateError:
            return False
        return True


def _work(calls: "SimpleQueue[_Call | None]") -> None:
    while (call := calls.get()) and call.make():
        del call  # nothing is to live on while this waits
