"""Reads files that others wrote: bounded in kind, size and depth before anything is made of
them."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

# of a JSON file that describes something: a config, a tokenizer's settings, a record
MAX_BYTES = 16 << 20
# of nested lists and objects: Python's own limit would strike later, in code that copies a value
MAX_DEPTH = 100
_MAX_DIGITS = 300  # of an integer that a float holds


def read_bytes(path: str | Path, max_bytes: int, *, of_end: bool = False) -> bytes:
    """Return the current content of a regular file, of_end: at most its last max_bytes; never wait
    for a pipe or a device.

    Raises:
        OSError: if the file is unreadable, not regular or larger than max_bytes; strerror says
            which.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if of_end:
            file.seek(max(0, status.st_size - max_bytes))
        elif status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes >> 20} MiB", str(path))
        return file.read(min(status.st_size, max_bytes))


def parse_json(text: str | bytes, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value of a JSON text. An integer beyond the range of floats becomes infinite, like
    1e999.

    Raises:
        ValueError: if the text is not JSON, or nested more than max_depth deep.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        value = _JSON.decode(text)
    except RecursionError:
        value, is_deep = None, True
    else:
        is_deep = text.count("[") + text.count("{") > max_depth and depth_of(value) > max_depth
    if is_deep:
        raise ValueError(f"lists and objects are nested more than {max_depth} deep")
    return value


def read_json(path: str | Path, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value of a JSON file. Raises OSError as `read_bytes`, ValueError as
    `parse_json`."""
    return parse_json(read_bytes(path, max_bytes), max_depth)


def depth_of(value: Any) -> int:
    """Return the depth of nested lists and objects; 0 for anything else.

    Without recursion: it guards Python's recursion limit.
    """
    depth = 0
    level = [value]
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


_JSON = json.JSONDecoder(parse_int=_integer)
