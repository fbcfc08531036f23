"""How often Python looks for garbage while episodes are played.

By default it does so after every 700 new objects, and from time to time it goes through all
objects. With 10,000 episodes this took more than half of the scheduler's time
(bench/rollout/environments.py), because they have many objects and none of them is garbage.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS_PER_EPISODE = 20
"""New objects per episode after which Python looks for garbage."""
_lock = threading.Lock()
_plays: list[int] = []
"""The number of episodes of each play in progress. There may be several plays, in threads."""
_usual_threshold = 0
"""The threshold when no episodes are in play."""


@contextmanager
def rarer_collections(episodes: int) -> Iterator[None]:
    """While `episodes` are played in parallel, make collections rarer in proportion to them."""
    global _usual_threshold
    with _lock:
        if not _plays:
            _usual_threshold = gc.get_threshold()[0]
        _plays.append(episodes)
        _set_threshold()
    try:
        yield
    finally:
        with _lock:
            _plays.remove(episodes)
            _set_threshold()


def _set_threshold() -> None:
    if _usual_threshold == 0:  # somebody has turned collections off
        return
    threshold = max(_usual_threshold, OBJECTS_PER_EPISODE * sum(_plays))
    gc.set_threshold(threshold, *gc.get_threshold()[1:])
