"""The event loop that episodes share.

An agent may end its own tasks, but not the loop or another episode. An agent's code runs in a
context that names its episode, and the callbacks and tasks that it makes inherit this context. If
such code stops the loop, or cancels a task of the scheduler or of another episode, its own episode
fails and nothing else happens.
"""

import asyncio
import gc
import resource
import selectors
import time
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, NamedTuple

from paw.types import Trajectory

_acting: "ContextVar[tuple[EpisodeLoop, Trajectory] | None]" = ContextVar("_acting", default=None)
"""The loop and episode of the agent whose code runs; None for the scheduler's own code."""

HOLD_S = 0.1
"""Seconds of one round of the loop that count as waiting.

Time beyond that, such as a long batch of the engine, is not the fault of the agents and calls that
are waiting.
"""


RUNS_SHARE = 0.5
"""A thread that ran for more than this share of a time span was not starved, unless it had to wait
for the disk."""


class ClockedSelector(selectors.DefaultSelector):
    """Waits for events, and measures how long the loop is busy between its waits."""

    def __init__(self) -> None:
        super().__init__()
        self._busy_since = time.monotonic()
        self._held_s = 0.0
        """Seconds beyond HOLD_S in which past rounds of the loop were busy."""

    def select(self, timeout: float | None = None) -> Any:
        self._held_s += self._excess()
        events = super().select(timeout)
        self._busy_since = time.monotonic()
        return events

    def held_s(self) -> float:
        """Seconds so far in which the loop was busy for longer than HOLD_S without a wait."""
        return self._held_s + self._excess()

    def _excess(self) -> float:
        return max(0.0, time.monotonic() - self._busy_since - HOLD_S)


class ThreadUsage(NamedTuple):
    """What this thread has done so far."""

    ran_s: float
    """Seconds of processor time."""
    waits: int
    """How often it has chosen to wait."""
    faults: int
    """How often it has waited for memory to be read from a disk."""

    @classmethod
    def now(cls) -> "ThreadUsage":
        """Return it; zeros on a system that does not count it for a thread."""
        if not hasattr(resource, "RUSAGE_THREAD"):
            return cls(0.0, 0, 0)
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        return cls(usage.ru_utime + usage.ru_stime, usage.ru_nvcsw, usage.ru_majflt)

    def was_starved(self, seconds: float) -> bool:
        """Whether other programs kept the thread from running for most of the `seconds` since."""
        now = ThreadUsage.now()
        if now.faults > self.faults:
            return True
        ran = now.ran_s - self.ran_s > RUNS_SHARE * seconds
        counts = hasattr(resource, "RUSAGE_THREAD")
        return counts and not ran and now.waits == self.waits


class GarbageClock:
    """Measures how long Python collects garbage, which may happen in any code."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        now = time.monotonic()
        if phase == "stop":
            self.seconds += now - self._started
        self._started = now


class EpisodeLoop(asyncio.SelectorEventLoop):
    """Runs the scheduler's tasks and those of agents, and knows whose code runs."""

    def __init__(self) -> None:
        self._clock = ClockedSelector()
        self._garbage = GarbageClock()
        super().__init__(self._clock)
        self._main: asyncio.Future[Any] | None = None
        """The future that the loop runs for."""
        self._refused: list[Trajectory] = []
        """Episodes whose agents tried something that was refused."""
        factory: Any = _make_task
        self.set_task_factory(factory)

    def enter(self, trajectory: Trajectory) -> None:
        """Assign the current task to the episode. From now on it runs the agent's code."""
        _acting.set((self, trajectory))
        task = asyncio.current_task()
        assert isinstance(task, SchedulerTask)
        task.trajectory = trajectory

    def patient_time(self) -> float:
        """Seconds on a clock that nearly stops while something holds the loop."""
        return self.time() - self._clock.held_s()

    def code_time(self) -> float:
        """Seconds on a clock that stands still while Python collects garbage."""
        return time.monotonic() - self._garbage.seconds

    def acting(self) -> Trajectory | None:
        """The episode whose agent's code runs now, on this loop."""
        acting = _acting.get()
        if acting is None:
            return None
        loop, trajectory = acting
        return trajectory if loop is self else None

    def run_until_complete(self, future: Any) -> Any:
        """Run until `future` is done, even inside another running loop (in cells of a notebook).

        asyncio allows only one running loop per thread. It exports `_set_running_loop` for event
        loops, which this one uses to hide the other loop while it runs.
        """
        main = asyncio.ensure_future(future, loop=self)
        self._main = main
        outer_loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        gc.callbacks.append(self._garbage)
        try:
            return super().run_until_complete(main)
        finally:
            gc.callbacks.remove(self._garbage)
            asyncio._set_running_loop(outer_loop)

    def stop(self) -> None:
        """Stop. asyncio calls this once the future that the loop runs for is done.

        An earlier call comes from an agent and is refused.
        """
        if self._main is None or self._main.done():
            super().stop()
        else:
            self.refuse("the agent stopped the event loop, on which other episodes are played")

    def refuse(self, reason: str) -> None:
        """Fail the episode whose agent's code is running.

        Raises RuntimeError in that code, unless it is a callback.
        """
        trajectory = self.acting()
        if trajectory is None:
            return
        trajectory.failure = trajectory.failure or f"RuntimeError: {reason}"
        self._refused.append(trajectory)
        if asyncio.current_task(self) is not None:
            raise RuntimeError(reason)

    def has_refused(self, trajectory: Trajectory) -> bool:
        return any(refused is trajectory for refused in self._refused)


class SchedulerTask(asyncio.Task[Any]):
    """A task that plays one episode or drives all episodes. No agent made it."""

    trajectory: Trajectory | None = None
    """The episode that it plays."""

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel, if the scheduler or the episode that it plays asks for it."""
        loop: Any = self.get_loop()
        acting = loop.acting()
        if acting is None or acting is self.trajectory:
            return super().cancel(msg)
        loop.refuse("the agent cancelled tasks that are not its own")
        return False


class AgentTask(asyncio.Task[Any]):
    """A task that an agent made, or a library for it."""

    trajectory: Trajectory | None = None
    """The episode in which it was made."""

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task. Another episode may do so too, since libraries share tasks among
        episodes.

        In that case the task is cancelled a moment later, unless that episode has meanwhile tried
        to cancel a task of the scheduler. That would mean that its agent cancels all tasks.
        """
        loop: Any = self.get_loop()
        acting = loop.acting()
        if acting is None or acting is self.trajectory:
            return super().cancel(msg)
        loop.call_soon(self._cancel_unless_refused, acting, msg)
        return not self.done()

    def _cancel_unless_refused(self, acting: Trajectory, msg: Any | None) -> None:
        loop: Any = self.get_loop()
        if not loop.has_refused(acting):
            super().cancel(msg)


def _make_task(loop: Any, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    trajectory = loop.acting()
    if trajectory is None:
        return SchedulerTask(coroutine, loop=loop, **options)
    task = AgentTask(coroutine, loop=loop, **options)
    task.trajectory = trajectory
    return task
