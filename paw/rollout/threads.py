"""Calls in threads, each with a deadline: code that hangs costs its caller one call.

Python cannot end a thread. One that outlasts its deadline is given up, and another takes its place. All are daemons, so
the interpreter ends without waiting for them.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from paw.errors import UserError

MAX_LOST = 100
"""Threads that hang at once, more of which end the run: each holds memory, and maybe a processor."""


class Threads:
    """At most `count` calls at once, of `timeout_s` each (None: for ever). To be used from one thread.

    `count` 0 runs each call at once in the caller's own thread, without a deadline.
    """

    def __init__(self, count: int, timeout_s: float | None = None) -> None:
        self.count, self.timeout_s = count, timeout_s
        self.given_up = 0
        """Calls that outlasted the deadline."""
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._open: dict[Future[Any], tuple[float, threading.Thread] | None] = {}
        """Calls not done yet: when and where each began, if it has. Who takes one out settles its future."""
        self._workers = 0
        self._lost: list[threading.Thread] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """The future of function(*args): its result, whatever it raises, or TimeoutError."""
        future: Future[Any] = Future()
        if not self.count:
            try:
                future.set_result(function(*args))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                future.set_exception(error)
            return future
        self._open[future] = None
        self._calls.put((future, partial(function, *args)))
        self._hire()
        return future

    def next_done(self, done: "SimpleQueue[Future[Any]]") -> Future[Any]:
        """The next of `done`, the queue that the caller's futures come to, while deadlines are kept.

        Raises UserError where more than MAX_LOST threads hang.
        """
        while True:
            with suppress(Empty):
                return done.get(timeout=self._give_up())

    def settled(self, future: Future[Any]) -> Future[Any]:
        """`future` once it is done."""
        done: SimpleQueue[Future[Any]] = SimpleQueue()
        future.add_done_callback(done.put)
        return self.next_done(done)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args), TimeoutError beyond the deadline."""
        return self.settled(self.submit(function, *args)).result()

    def close(self, *last: Callable[[], Any]) -> None:
        """End the threads after the `last` calls, whatever those raise. None waits longer than the deadline."""
        wait([self.submit(function) for function in last], timeout=self.timeout_s)
        for _ in range(self._workers):
            self._calls.put(None)
        self._workers, self._calls = 0, SimpleQueue()

    def _hire(self) -> None:
        while self._workers < min(self.count, len(self._open)):
            self._workers += 1
            threading.Thread(target=self._work, args=(self._calls,), daemon=True).start()

    def _work(self, calls: "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
        while (call := calls.get()) and self._run(*call):
            del call  # nothing is to live on while this waits

    def _run(self, future: Future[Any], function: Callable[[], Any]) -> bool:
        """Make the call; whether it was in time."""
        self._open[future] = time.monotonic(), threading.current_thread()
        settle: Callable[[], None]
        try:
            settle = partial(future.set_result, function())
        except BaseException as error:
            settle = partial(future.set_exception, error)
        in_time = self._open.pop(future, None) is not None
        if in_time:
            settle()
        return in_time

    def _give_up(self) -> float | None:
        """Fail what is late; the seconds until the next call may be."""
        if self.timeout_s is None:
            return None
        soonest = self.timeout_s
        for future, begun in self._open.copy().items():
            left = begun[0] + self.timeout_s - time.monotonic() if begun else self.timeout_s
            if left > 0:
                soonest = min(soonest, left)
            elif begun and self._open.pop(future, None):
                self._lose(begun[1])
                future.set_exception(TimeoutError(f"no answer within {self.timeout_s:g} s"))
        return soonest

    def _lose(self, thread: threading.Thread) -> None:
        # One that runs Python code ends by this; one that waits in C does when it returns.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        self.given_up += 1
        self._lost = [lost for lost in (*self._lost, thread) if lost.is_alive()]
        if len(self._lost) > MAX_LOST:
            raise UserError(
                f"stopped: {len(self._lost)} threads hang in calls that took longer than env.step_timeout_s = "
                f"{self.timeout_s:g}; give what the environment waits for a time limit of its own"
            )
        self._workers -= 1
        self._hire()
