"""Episodes of the next updates, played while the trainer works: each update's in a thread, over servers that take new
weights meanwhile.

Those of update t begin when the trainer begins with update t - rollout.ahead, so no token is of older weights.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from paw.rollout.scheduler import Played, Progress, Rollouts

STOP_S = 5.0
"""Seconds for episodes in play to end with the run."""


class Ahead:
    """Plays `ahead` updates before the one that is asked for; `make` gives each its own environments and engine."""

    def __init__(self, make: Callable[[], Rollouts], *, ahead: int, updates: int) -> None:
        self._ahead, self._updates = ahead, updates
        self._now, self._idle = make(), [make() for _ in range(ahead + 1)]
        self._playing: dict[int, tuple[Rollouts, Future[Played]]] = {}
        self._begun = -1

    def training(self, step: int, count: int, progress: Progress | None = None) -> Played:
        """The episodes of update `step`, as `Rollouts.training` plays them; takes all ranks."""
        for later in range(max(step, self._begun + 1), min(step + self._ahead, self._updates - 1) + 1):
            self._begin(later, count, progress)
        if step not in self._playing:  # they failed, and are played again
            return self._now.training(step, count, progress)
        rollouts, played = self._playing.pop(step)
        own = played.result()
        self._idle.append(rollouts)
        return rollouts.share(own, rollouts.tasks(step, count))

    def evaluation(self, progress: Progress | None = None) -> Played:
        return self._now.evaluation(progress)

    def close(self) -> None:
        """What is in play is dropped: a run that goes on plays it again."""
        for rollouts, played in self._playing.values():
            rollouts.loop.call_soon_threadsafe(rollouts.end, asyncio.CancelledError())
            played.exception(timeout=STOP_S)
        for rollouts in (self._now, *self._idle, *(rollouts for rollouts, _ in self._playing.values())):
            rollouts.close()

    def _begin(self, step: int, count: int, progress: Progress | None) -> None:
        self._begun = step
        rollouts, played = self._idle.pop(), Future[Played]()
        self._playing[step] = rollouts, played
        tasks = rollouts.tasks(step, count)

        def play() -> None:
            try:
                played.set_result(rollouts.play_own(tasks, **rollouts.options(step), progress=progress))
            except BaseException as error:
                played.set_exception(error)

        threading.Thread(target=play, daemon=True).start()
