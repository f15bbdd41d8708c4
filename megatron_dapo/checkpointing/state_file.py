"""The rollout's state as one safetensors file: plain data as JSON, arrays as binary.

Tensors: `json`, the text; and one per dtype, all arrays of it one after the other. An object in the
text such as {"__array__": ["int32", 0, 512]} stands for a part of these. If the data have that key
themselves, `key` is the longer one in use.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megatron_dapo.common.files import write_whole

SUFFIX = ".safetensors"

_ARRAY = "__array__"
_DTYPES = ("float32", "int32", "uint8", "uint16")


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write plain data whole; see `to_bytes`."""
    write_whole(path, to_bytes(state))


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of `write_state`, with lists for tuples.

    Raises FileNotFoundError, and ValueError for a damaged file.
    """
    content = path.read_bytes()
    try:
        return from_bytes(content)
    except (SafetensorError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from error


def to_bytes(state: dict[str, Any]) -> bytes:
    """Return plain data as the content of a file. Equal data give equal bytes.

    Raises TypeError for values that JSON cannot hold, such as bytes in a prompt's extra_info, and
    for arrays of another dtype or of several dimensions.
    """
    key = _ARRAY
    text, arrays = _taken_apart(state, key)
    while text.count(f'"{key}":') > sum(map(len, arrays.values())):  # the data have it, too
        key += "_"
        text, arrays = _taken_apart(state, key)
    tensors = {name: np.concatenate(parts) for name, parts in arrays.items() if parts}
    if key != _ARRAY:
        tensors["key"] = np.frombuffer(key.encode(), np.uint8)
    return save({"json": np.frombuffer(text.encode(), np.uint8), **tensors})


def _taken_apart(state: dict[str, Any], key: str) -> tuple[str, dict[str, list[np.ndarray]]]:
    """Return the data as JSON, with objects of this key in place of arrays, and the arrays by
    dtype."""
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in _DTYPES}
    ends = dict.fromkeys(_DTYPES, 0)

    def taken_out(value: object) -> dict:
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.name not in arrays:
            raise TypeError(f"a state cannot hold {value!r}")
        name = value.dtype.name
        start = ends[name]
        arrays[name].append(value)
        ends[name] += len(value)
        return {key: [name, start, ends[name]]}

    return json.dumps(state, separators=(",", ":"), default=taken_out), arrays


def from_bytes(content: bytes) -> dict[str, Any]:
    """Return the data of `to_bytes`, with lists for tuples. Raises SafetensorError, or KeyError,
    for damaged content."""
    tensors = load(content)
    key = tensors["key"].tobytes().decode() if "key" in tensors else _ARRAY

    def put_back(value: dict) -> Any:
        if value.keys() != {key}:
            return value
        name, start, end = value[key]
        return tensors[name][start:end]

    return json.loads(tensors.pop("json").tobytes(), object_hook=put_back)
