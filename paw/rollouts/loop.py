"""The event loop that episodes share: an agent ends what is its own, not the loop or another's episode.

Code of an agent runs in a context that names its episode; callbacks and tasks that it makes inherit
it. If such code stops the loop, or cancels what belongs to the scheduler or to another episode,
nothing happens but that its own episode has failed.
"""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

from paw.types import Trajectory

_acting: "ContextVar[tuple[EpisodeLoop, Trajectory] | None]" = ContextVar("_acting", default=None)
"""The loop and the episode whose agent's code runs; None for the scheduler's own."""


class EpisodeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._main: asyncio.Future[Any] | None = None
        self._refused: list[Trajectory] = []
        factory: Any = _make_task
        self.set_task_factory(factory)

    def enter(self, trajectory: Trajectory) -> None:
        """From now on the current task is that episode's."""
        _acting.set((self, trajectory))
        task = asyncio.current_task()
        assert isinstance(task, SchedulerTask)
        task.trajectory = trajectory

    def acting(self) -> Trajectory | None:
        """The episode whose agent's code runs now, on this loop."""
        loop, trajectory = _acting.get() or (None, None)
        return trajectory if loop is self else None

    def run_until_complete(self, future: Any) -> Any:
        """Runs inside another running loop as well, that of a notebook's cells.

        asyncio allows one running loop a thread. It exports `_set_running_loop` for event loops:
        this one hides the other while it runs.
        """
        self._main = asyncio.ensure_future(future, loop=self)
        outer_loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            return super().run_until_complete(self._main)
        finally:
            asyncio._set_running_loop(outer_loop)

    def stop(self) -> None:
        """asyncio's own call, once what the loop runs for is done; an earlier one is an agent's, and is refused."""
        if self._main is None or self._main.done():
            super().stop()
        else:
            self.refuse("the agent stopped the event loop, on which other episodes are played")

    def refuse(self, why: str) -> None:
        """Fails the episode whose agent's code runs now.

        Raises RuntimeError there, unless it runs in a callback.
        """
        if trajectory := self.acting():
            trajectory.failure = trajectory.failure or f"RuntimeError: {why}"
            self._refused.append(trajectory)
            if asyncio.current_task(self) is not None:
                raise RuntimeError(why)

    def has_refused(self, trajectory: Trajectory) -> bool:
        return any(refused is trajectory for refused in self._refused)


class SchedulerTask(asyncio.Task[Any]):
    """One that no agent made: it plays an episode, or drives them all."""

    trajectory: Trajectory | None = None
    """Of the episode that it plays."""

    def cancel(self, msg: Any | None = None) -> bool:
        """Only the scheduler, and the episode that it plays, cancel it."""
        loop: Any = self.get_loop()
        culprit = loop.acting()
        if culprit is None or culprit is self.trajectory:
            return super().cancel(msg)
        loop.refuse("the agent cancelled tasks that are not its own")
        return False


class AgentTask(asyncio.Task[Any]):
    """One that an agent made, or a library for it."""

    trajectory: Trajectory | None = None
    """Of the episode in which it was made."""

    def cancel(self, msg: Any | None = None) -> bool:
        """A task that a library shares among episodes may end in any of them. So another episode
        cancels it too, but a moment later, and not if it then turns out to cancel whatever there
        is, the scheduler's tasks included."""
        loop: Any = self.get_loop()
        culprit = loop.acting()
        if culprit is None or culprit is self.trajectory:
            return super().cancel(msg)
        loop.call_soon(self._cancel_unless_refused, culprit, msg)
        return not self.done()

    def _cancel_unless_refused(self, culprit: Trajectory, msg: Any | None) -> None:
        loop: Any = self.get_loop()
        if not loop.has_refused(culprit):
            super().cancel(msg)


def _make_task(loop: Any, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    trajectory = loop.acting()
    if trajectory is None:
        return SchedulerTask(coroutine, loop=loop, **options)
    task = AgentTask(coroutine, loop=loop, **options)
    task.trajectory = trajectory
    return task
