"""Speeds up the import of torch and packages that depend on it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep Python from collecting garbage in this block.

    torch and transformers make so many objects that looking through them takes a sixth of the
    time of their import, and none of them is garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
