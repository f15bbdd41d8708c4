"""Imports of thousands of modules, without garbage collection of their objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dapo.common.garbage import collection_paused


@contextmanager
def large_imports() -> Iterator[None]:
    """Pause the garbage collector during the block's imports, and exempt their objects for good.

    Objects of modules stay. Scanning them takes an eighth of the import time of an SGLang server,
    and causes pauses in later steps.
    """
    with collection_paused():
        yield
        gc.freeze()
