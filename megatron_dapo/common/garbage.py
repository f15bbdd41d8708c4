"""A pause of Python's garbage collector while a block makes many objects that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the garbage collector away while the block runs; a pause within a pause ends with the outer one.

    Every so many new objects it looks through all that there are, in vain where they stay. Also a decorator.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
