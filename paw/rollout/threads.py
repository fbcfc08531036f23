"""Calls in threads, each with a deadline: code that hangs costs its caller one call.

Python cannot end a thread. One that outlasts its deadline is given up, and another takes its place. All are daemons, so
the interpreter ends without waiting for them.
"""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from paw.errors import UserError

MAX_LOST = 100
"""Threads that hang at once; one more ends the run: each holds memory, and maybe a processor."""
_Call = tuple[Future[Any], Callable[[], Any]]


class Threads:
    """At most `count` calls at once, each of at most `timeout_s` seconds (None: no deadline).

    With `count` 0 every call is made at once in the caller's own thread, without a deadline.
    """

    def __init__(self, count: int, timeout_s: float | None = None) -> None:
        self.count, self.timeout_s = count, timeout_s
        self.given_up = 0
        """Calls that outlasted the deadline."""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._workers = self._open = 0
        self._begun: dict[Future[Any], tuple[float, threading.Thread]] = {}
        """When and where each call that runs began: the oldest comes first, and so is the first to be late."""
        self._watched = False
        self._lost: list[threading.Thread] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """The future of function(*args): its result, or what it raises; TimeoutError beyond the deadline, UserError
        once more than MAX_LOST threads hang.
        """
        future: Future[Any] = Future()
        if not self.count:
            try:
                future.set_result(function(*args))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                future.set_exception(error)
            return future
        self._calls.put((future, partial(function, *args)))
        with self._lock:
            self._open += 1
            self._hire()
            if self.timeout_s is not None and not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, args=(self.timeout_s,), daemon=True).start()
        return future

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`submit`, and wait for the result."""
        return self.submit(function, *args).result()

    async def settled(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """`submit`, and wait until the future is done. A coroutine could not raise all that it may hold."""
        future, loop, done = self.submit(function, *args), asyncio.get_running_loop(), asyncio.Event()
        if not future.done():

            def wake(_: object) -> None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(done.set)

            future.add_done_callback(wake)
            await done.wait()
        return future

    def close(self, *last: Callable[[], Any]) -> None:
        """End the threads after the `last` calls, whatever those raise. None waits longer than the deadline."""
        wait([self.submit(function) for function in last], timeout=self.timeout_s)
        with self._lock:
            for _ in range(self._workers):
                self._calls.put(None)
            self._workers, self._calls = 0, SimpleQueue()

    def _hire(self) -> None:
        while self._workers < min(self.count, self._open):
            self._workers += 1
            threading.Thread(target=self._work, args=(self._calls,), daemon=True).start()

    def _work(self, calls: "SimpleQueue[_Call | None]") -> None:
        while (call := calls.get()) and self._run(*call):
            del call  # nothing is to live on while this waits

    def _run(self, future: Future[Any], function: Callable[[], Any]) -> bool:
        """Make the call; whether it was in time."""
        self._begun[future] = time.monotonic(), threading.current_thread()
        try:
            settle = partial(future.set_result, function())
        except BaseException as error:
            settle = partial(future.set_exception, error)
        with self._lock:
            if self._begun.pop(future, None) is None:
                return False
            self._open -= 1
            settle()
        return True

    def _watch(self, timeout_s: float) -> None:
        """Give up what is late, while there are calls."""
        while self._watched:
            time.sleep(min(1.0, timeout_s / 10))
            with self._lock:
                for future, (begun, thread) in self._begun.copy().items():
                    if time.monotonic() - begun < timeout_s:
                        break
                    self._give_up(future, thread, timeout_s)
                self._watched = self._open > 0

    def _give_up(self, future: Future[Any], thread: threading.Thread, timeout_s: float) -> None:
        # One that runs Python code ends by this; one that waits in C does when it returns.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        del self._begun[future]
        self.given_up += 1
        self._lost = [lost for lost in (*self._lost, thread) if lost.is_alive()]
        self._workers -= 1
        self._open -= 1
        self._hire()
        error: Exception = TimeoutError(f"no answer within {timeout_s:g} s")
        if len(self._lost) > MAX_LOST:
            error = UserError(
                f"stopped: {len(self._lost)} threads hang in calls that took longer than env.step_timeout_s = "
                f"{timeout_s:g}; give what the environment waits for a time limit of its own"
            )
        future.set_exception(error)
