"""Objects that hold many arrays, as one array of bytes and through a pipe: the arrays are copied, not written out.

The bytes: the number of parts, their sizes, and the parts, each at a multiple of ALIGNMENT. The first part is a pickle
of protocol 5, the others are the arrays' memory, which the pickle does not contain.
"""

import os
import pickle
from collections.abc import Sequence
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatron_dapo.common.sizes import round_up

ALIGNMENT = 8  # bytes: the largest element of the arrays here
_NUMBER = np.dtype(np.int64)


def flat_pickle(value: Any) -> np.ndarray:
    """Return an object as one array of bytes, uint8."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    sizes = [part.nbytes for part in parts]
    starts = _starts(sizes)
    flat = np.empty(starts[-1], dtype=np.uint8)
    numbers = np.array([len(sizes), *sizes], dtype=_NUMBER)
    flat[: numbers.nbytes] = numbers.view(np.uint8)
    memory = flat.data
    for start, part in zip(starts, parts, strict=False):
        memory[start : start + part.nbytes] = part
    return flat


def from_flat_pickle(flat: np.ndarray) -> Any:
    """Return what `flat_pickle` described. Its arrays are views of `flat`, which lives as long as one of them does."""
    num_parts = int(flat[: _NUMBER.itemsize].view(_NUMBER)[0])
    sizes = flat[_NUMBER.itemsize : (1 + num_parts) * _NUMBER.itemsize].view(_NUMBER).tolist()
    memory = flat.data
    parts = (memory[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=False))
    return pickle.loads(next(parts), buffers=parts)


def send(connection: Connection, value: Any) -> None:
    """Send an object through a pipe, for `receive`."""
    flat = flat_pickle(value)
    connection.send_bytes(np.array([len(flat)], dtype=_NUMBER).tobytes())
    memory = flat.data
    while len(memory):
        memory = memory[os.write(connection.fileno(), memory) :]


def receive(connection: Connection) -> Any:
    """Return an object that `send` sent. Raises EOFError where the other end is closed."""
    (size,) = np.frombuffer(connection.recv_bytes(), dtype=_NUMBER)
    flat = np.empty(size, dtype=np.uint8)
    num_received = 0
    while num_received < size:  # a Connection's own way makes a copy of each part
        number = os.readv(connection.fileno(), [flat.data[num_received:]])
        if number == 0:
            raise EOFError
        num_received += number
    return from_flat_pickle(flat)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return where each part begins, and where the last one ends."""
    first = (1 + len(sizes)) * _NUMBER.itemsize
    return list(accumulate((round_up(size, ALIGNMENT) for size in sizes), initial=first))
