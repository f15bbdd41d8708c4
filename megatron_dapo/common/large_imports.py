"""Imports of thousands of modules, without looking for garbage among what they make."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dapo.common.garbage import collection_paused


@contextmanager
def large_imports() -> Iterator[None]:
    """Keep the garbage collector away while the block imports, and for good from what there is at its end.

    What modules make stays: looking through it again and again takes an eighth of the time in which a server of SGLang
    is imported, and a pause in the middle of a step later on.
    """
    with collection_paused():
        yield
        gc.freeze()
