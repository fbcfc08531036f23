"""Importing torch and what depends on it, in less time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Python does not look for garbage meanwhile.

    torch and transformers make so many objects that looking through them takes a sixth of the
    time in which they are imported, and none of them is garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
