"""Objects with many arrays as one view of memory: each array is copied there once, not written out.

The memory holds the length of a pickle, the pickle, and the arrays' memory, each part at a multiple
of ALIGNMENT. The pickle gives each array's start in that memory. An array of one repeated value
(`token_arrays.repeated`) takes one element there.

The resulting arrays are read-only. Their dtypes are those of numbers, text and objects: numpy gives
no buffer of dates.
"""

import io
import mmap
import os
import pickle
from collections.abc import Iterator, Sequence
from itertools import repeat
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np

from megatron_dapo.common.garbage import collection_paused
from megatron_dapo.common.sizes import round_up
from megatron_dapo.data.token_arrays import is_repeated

ALIGNMENT = 8  # bytes: the largest element of the arrays here
_NUMBER = np.dtype(np.int64)
_MAX_VIEWS = 1024  # of one writev call of the system


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
    """Return the object described by `flat_pickle`.

    Its arrays are views of `flat`, which lives as long as any of them.
    """
    num_bytes = int(flat[: _NUMBER.itemsize].view(_NUMBER)[0])
    memory = flat.data[_NUMBER.itemsize :]
    arrays = memory[round_up(num_bytes, ALIGNMENT) :]
    return pickle.loads(memory[:num_bytes], buffers=repeat(arrays))


def send(connection: Connection, value: Any) -> None:
    """Send an object to another process on this machine, for `receive`.

    It is written to memory without a name; the connection, a socket, carries the right to map it.
    """
    file = os.memfd_create("flat_pickle")
    try:
        _write(file, _memory_of(value))
        send_handle(connection, file, None)
    finally:
        os.close(file)


def receive(connection: Connection) -> Any:
    """Return an object from `send`. Raises EOFError after the other end is closed.

    Its arrays are views of the memory written by the sender, which lives as long as any of them.
    """
    file = recv_handle(connection)
    try:
        memory = mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(file)
    return from_flat_pickle(np.frombuffer(memory, dtype=np.uint8))


class _Pickler(pickle.Pickler):
    """Writes an array as a call of its constructor, with its start in the arrays' memory.

    That memory is the pickle's out-of-band part, once per array and always the same.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda _: None)
        self.arrays: list[np.ndarray] = []
        self._end = 0
        self._memory = pickle.PickleBuffer(b"")
        self.dispatch_table = {np.ndarray: self._described}

    def _described(self, array: np.ndarray) -> str | tuple:
        if array.dtype.hasobject:
            # within the pickle: protocol 5 would ask for memory of its own
            return array.__reduce_ex__(4)
        written = array[:1] if is_repeated(array) else np.asarray(array, order="C")
        strides = array.strides if is_repeated(array) else written.strides
        start = self._end
        self.arrays.append(written)
        self._end += round_up(written.nbytes, ALIGNMENT)
        return np.ndarray, (array.shape, array.dtype, self._memory, start, strides)


@collection_paused()
def _memory_of(value: Any) -> list[memoryview]:
    """Return the memory in order; the arrays' part of it is not copied."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    head = np.frombuffer(file.getbuffer(), dtype=np.uint8)
    parts: list[np.ndarray] = [np.array([len(head)], dtype=_NUMBER), head, *pickler.arrays]
    views = []
    for part in parts:
        if not part.nbytes:
            continue
        views.append(part.data.cast("B"))
        if padding := -part.nbytes % ALIGNMENT:
            views.append(memoryview(bytes(padding)))
    return views


def _write(file: int, views: Sequence[memoryview]) -> None:
    for start in range(0, len(views), _MAX_VIEWS):
        rest = list(views[start : start + _MAX_VIEWS])
        while rest:
            rest = list(_behind(rest, os.writev(file, rest)))


def _behind(views: Sequence[memoryview], num_bytes: int) -> Iterator[memoryview]:
    """Yield the rest of the views behind this many bytes."""
    for view in views:
        if view.nbytes > num_bytes:
            yield view[num_bytes:]
        num_bytes = max(0, num_bytes - view.nbytes)
