"""Calls in threads, each with a time limit. If code hangs, its caller loses only that call.

Python cannot end a thread. A thread that exceeds the limit is abandoned, and another takes its
place. All threads are daemons, so the interpreter ends without waiting for them.
"""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, NoReturn

from paw.errors import EnvironmentFailure, UserError, describe

MAX_LOST = 100
"""Maximum number of hanging threads. One more ends the run: each keeps memory and maybe a core."""
DAY_S = 86400.0
"""Longest single wait if there is no time limit."""


class Threads:
    """Runs at most `count` calls at once, each for at most `timeout_s` seconds (None: no limit).

    With `count` 0, calls run in the caller's own thread. A call that takes longer raises
    TimeoutError, or UserError if more than MAX_LOST threads hang.
    """

    def __init__(self, count: int, timeout_s: float | None = None) -> None:
        self.count = count
        self.timeout_s = timeout_s
        self.given_up = 0
        """Number of calls that exceeded the time limit or were abandoned at Ctrl-C."""
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        """Calls that wait for a thread. None ends a thread."""
        self._threads = 0
        """Number of threads that take calls."""
        self.open_calls = 0
        """Number of calls that have not ended yet."""
        self._hanging: list[threading.Thread] = []
        """Threads that were abandoned and still run."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return or raise what function(*args) returns or raises."""
        call = self._submit(function, *args)
        try:
            while remaining_s := self._remaining_s(call):
                wait([call], remaining_s)
        except KeyboardInterrupt:
            self.given_up += 1  # so nobody waits for this thread, for example when closing a game
            raise
        return self._result(call)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Like `call`, for coroutines."""
        submitted = self._submit(function, *args)
        while remaining_s := self._remaining_s(submitted):
            await asyncio.wait([asyncio.wrap_future(submitted)], timeout=remaining_s)
        return self._result(submitted)

    def close(self, *last: Callable[[], Any]) -> None:
        """Make the `last` calls, whatever they raise, then end the threads.

        Waits for these calls for at most the time limit.
        """
        wait([self._submit(function) for function in last], self.timeout_s)
        for _ in range(self._threads):
            self._queue.put(None)
        self._queue = SimpleQueue()
        self._threads = 0
        self.open_calls = 0

    def _submit(self, function: Callable[..., Any], *args: Any) -> "_Call":
        call = _Call(function, *args)
        self.open_calls += 1
        if self.count:
            self._queue.put(call)
            self._start_threads()
        else:
            call.make()
        return call

    def _start_threads(self) -> None:
        """Start threads until there is one for each open call, or `count` threads."""
        while self._threads < min(self.count, self.open_calls):
            self._threads += 1
            threading.Thread(target=_work, args=(self._queue,), daemon=True).start()

    def _remaining_s(self, call: "_Call") -> float:
        """Return the seconds until the call exceeds the limit, 0 if it has ended."""
        if call.done():
            return 0.0
        elapsed_s = 0.0
        if call.thread:
            elapsed_s = time.monotonic() - call.started
        return max(0.0, (self.timeout_s or DAY_S) - elapsed_s)

    def _result(self, call: "_Call") -> Any:
        """Return the result of a call that has ended. Abandons the call if it has not."""
        self.open_calls -= 1
        has_ended = not call.cancel()
        if not has_ended:
            self._give_up(call)
        value, error = call.result()
        if error is not None:
            raise error
        return value

    def _give_up(self, call: "_Call") -> NoReturn:
        """Abandon the call's thread, put another in its place, and raise."""
        assert call.thread
        # A thread that runs Python code ends at once. One that waits in C ends when that returns.
        thread_id = ctypes.c_ulong(call.thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(SystemExit))
        self.given_up += 1
        self._hanging.append(call.thread)
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        self._threads -= 1
        self._start_threads()
        if len(self._hanging) > MAX_LOST:
            raise UserError(
                f"stopped: {len(self._hanging)} threads hang in calls that took longer than "
                f"env.step_timeout_s = {self.timeout_s:g}; "
                "set a time limit on whatever the environment waits for"
            )
        raise TimeoutError(f"no answer within {self.timeout_s:g} s")


class Daemons(ThreadPoolExecutor):
    """An executor for `asyncio.to_thread` with a daemon thread for each call.

    No call waits for another, and the interpreter ends without waiting for any.
    """

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
    """A call whose result is (what it returned, what it raised). Cancelling it abandons it."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        super().__init__()
        self.function = function
        self.args = args
        self.started = 0.0
        """Start time of the call, once it has a thread."""
        self.thread: threading.Thread | None = None

    def make(self) -> bool:
        """Make the call and return whether it was in time."""
        self.started = time.monotonic()
        self.thread = threading.current_thread()
        try:
            result = self.function(*self.args), None
        except (StopIteration, asyncio.CancelledError) as error:
            # These would have a different meaning if raised from a coroutine.
            result = None, EnvironmentFailure(describe(error))
        except BaseException as error:
            result = None, error
        try:
            self.set_result(result)
        except InvalidStateError:
            return False
        return True


def _work(calls: "SimpleQueue[_Call | None]") -> None:
    """Make the calls of a queue until None arrives or a call is abandoned."""
    while (call := calls.get()) and call.make():
        del call  # keeps nothing alive while this waits for the next call
