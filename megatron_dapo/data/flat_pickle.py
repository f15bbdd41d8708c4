"""Objects that hold many arrays, as one view of memory: the arrays are copied there once, not written out.

The memory: the number of parts, their sizes, and the parts, each at a multiple of ALIGNMENT. The first part is a pickle
of protocol 5, the others are the arrays' memory, which the pickle does not contain.
"""

import mmap
import os
import pickle
from collections.abc import Iterator, Sequence
from itertools import accumulate
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np

from megatron_dapo.common.garbage import collection_paused
from megatron_dapo.common.sizes import round_up

ALIGNMENT = 8  # bytes: the largest element of the arrays here
_NUMBER = np.dtype(np.int64)
_MAX_VIEWS = 1024  # that one call of the system writes


def flat_pickle(value: Any) -> np.ndarray:
    """Return an object as one array of bytes, uint8."""
    views = _memory_of(value)
    flat = np.empty(sum(view.nbytes for view in views), dtype=np.uint8)
    memory = flat.data
    start = 0
    for view in views:
        memory[start : start + view.nbytes] = view
        start += view.nbytes
    return flat


@collection_paused()
def from_flat_pickle(flat: np.ndarray) -> Any:
    """Return what `flat_pickle` described. Its arrays are views of `flat`, which lives as long as one of them does."""
    num_parts = int(flat[: _NUMBER.itemsize].view(_NUMBER)[0])
    sizes = flat[_NUMBER.itemsize : (1 + num_parts) * _NUMBER.itemsize].view(_NUMBER).tolist()
    memory = flat.data
    parts = (memory[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=True))
    return pickle.loads(next(parts), buffers=parts)


def send(connection: Connection, value: Any) -> None:
    """Send an object to another process on this machine, for `receive`.

    It is written to memory that has no name; the connection, a socket, carries the right to map it.
    """
    file = os.memfd_create("flat_pickle")
    try:
        _write(file, _memory_of(value))
        send_handle(connection, file, None)
    finally:
        os.close(file)


def receive(connection: Connection) -> Any:
    """Return an object that `send` sent. Raises EOFError where the other end is closed.

    Its arrays are views of the memory that the sender wrote, which lives as long as one of them does.
    """
    file = recv_handle(connection)
    try:
        memory = mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(file)
    return from_flat_pickle(np.frombuffer(memory, dtype=np.uint8))


@collection_paused()
def _memory_of(value: Any) -> list[memoryview]:
    """Return the memory, in order, of which the arrays' part is not copied."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    sizes = [part.nbytes for part in parts]
    views = [np.array([len(sizes), *sizes], dtype=_NUMBER).view(np.uint8).data]
    for part in parts:
        views += [part, memoryview(bytes(round_up(part.nbytes, ALIGNMENT) - part.nbytes))]
    return [view for view in views if view.nbytes]


def _write(file: int, views: Sequence[memoryview]) -> None:
    for start in range(0, len(views), _MAX_VIEWS):
        rest = list(views[start : start + _MAX_VIEWS])
        while rest:
            rest = list(_behind(rest, os.writev(file, rest)))


def _behind(views: Sequence[memoryview], num_bytes: int) -> Iterator[memoryview]:
    """Yield what is left of the views behind this many bytes."""
    for view in views:
        if view.nbytes > num_bytes:
            yield view[num_bytes:]
        num_bytes = max(0, num_bytes - view.nbytes)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return where each part begins."""
    first = (1 + len(sizes)) * _NUMBER.itemsize
    return list(accumulate((round_up(size, ALIGNMENT) for size in sizes[:-1]), initial=first))
