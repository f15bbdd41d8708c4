"""Arrays of values per token, their making from JSON, and records with such fields.

A token costs a Python list 40 bytes and more per value, and as much time; an array costs 1 or 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, TypeAlias

import numpy as np

TOKEN = np.int32
LOG_PROB = np.float32
MASK = np.uint8
VERSION = np.int32
EXPERT = np.uint8

Dtype: TypeAlias = type[np.generic]
TokenIds: TypeAlias = Sequence[int] | np.ndarray

# a record's field -> the name of one of its values, in sentences
_NAMES = {
    "tokens": "token id",
    "prompt_tokens": "token id",
    "response_tokens": "token id",
    "log_probs": "log-prob",
    "rollout_log_probs": "log-prob",
    "loss_mask": "loss mask",
    "weight_versions": "weight version",
    "routed_experts": "routed expert",
}
# kind of a dtype -> the types of its values in JSON
_KINDS: dict[str, set[type]] = {"i": {int}, "u": {int}, "f": {int, float}}
_WORDS = {"i": "no whole number", "u": "no whole number", "f": "no number"}


def token_array(values: Any, dtype: Dtype, what: str = "value") -> np.ndarray:
    """Return a sequence of numbers as an array [L]; an array is returned as it is.

    Raises ValueError, its text the end of a sentence. Its causes are a value of another type than
    numbers, a fraction for a dtype of whole numbers, and a value outside the dtype's range.

    what: the values' name in the error.
    """
    if isinstance(values, np.ndarray):
        return values
    kind = np.dtype(dtype).kind
    if not set(map(type, values)) <= _KINDS[kind]:
        wrong = next(value for value in values if type(value) not in _KINDS[kind])
        raise ValueError(f"has the {what} {wrong!r}, {_WORDS[kind]}")
    try:
        with np.errstate(over="ignore"):  # to infinity, named by the checks of log-probs
            return np.array(values, dtype=dtype)
    except OverflowError:
        bounds = np.iinfo(np.dtype(dtype).name) if kind in "iu" else np.finfo(np.dtype(dtype).name)
        wrong = next(value for value in values if not bounds.min <= value <= bounds.max)
        raise ValueError(f"has the {what} {wrong}, which {bounds.dtype} cannot hold") from None


def joined(dtype: Dtype, *parts: TokenIds) -> np.ndarray:
    """Return arrays or sequences, one after the other, in one array.

    An array is returned as it is if all others are empty. `repeated` ones of the same value make a
    `repeated` one.
    """
    arrays = [np.asarray(part, dtype=dtype) for part in parts if len(part)]
    if len(arrays) == 1:
        return arrays[0]
    if arrays and all(is_repeated(array) and array[0] == arrays[0][0] for array in arrays):
        return repeated(arrays[0][0], sum(map(len, arrays)), dtype)
    return np.concatenate([nothing(dtype), *arrays])


def repeated(value: float, length: int, dtype: Dtype) -> np.ndarray:
    """Return an array [length] of one value, held once by memory."""
    return np.broadcast_to(np.array(value, dtype=dtype), length)


def is_repeated(array: np.ndarray) -> bool:
    """Return whether memory holds one value for all places of the array."""
    return array.strides == (0,)


def has_one_value(array: np.ndarray) -> bool:
    """Return whether all values, at least one, are the same; a `repeated` array needs no look."""
    return len(array) > 0 and (is_repeated(array) or bool((array == array[0]).all()))


def nothing(dtype: Dtype) -> np.ndarray:
    """Return the array of no tokens."""
    return np.zeros(0, dtype=dtype)


class TokenRecord:
    """A frozen data class, declared with eq=False, with arrays [L] among its fields.

    ARRAYS: these fields with their dtypes. A given sequence becomes an array. A given array is
    taken without a copy, so nobody may write into it.

    Two records are equal if all their values are.
    """

    ARRAYS: ClassVar[Mapping[str, Dtype]] = {}

    def __post_init__(self) -> None:
        for name, dtype in self.ARRAYS.items():
            object.__setattr__(self, name, token_array(getattr(self, name), dtype, _NAMES[name]))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, name), getattr(other, name))
            if name in self.ARRAYS
            else getattr(self, name) == getattr(other, name)
            for name in (field.name for field in fields(self))  # type: ignore[arg-type]
        )

    def __hash__(self) -> int:
        """Return a hash of all values but the arrays: quick, and the same for equal records."""
        names = (field.name for field in fields(self))  # type: ignore[arg-type]
        return hash(tuple(getattr(self, name) for name in names if name not in self.ARRAYS))
