"""What a key's field says besides its type: under which other keys it acts, and whether it may change on resume.

Both are metadata of `typing.Annotated`, on the field of a key or on the field of a whole section. `config/keys.py`
collects them, `checks/unused_keys.py` and `checkpointing/config_changes.py` act on them, docs/config.md shows them.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar


@dataclass(frozen=True, init=False)
class Is:
    """Holds where a key has one of these values."""

    key: str
    values: tuple[Any, ...]

    def __init__(self, key: str, *values: Any) -> None:
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "values", values)

    def of_key(self, key: str) -> "Is":
        return Is(key, *self.values)

    def holds(self, value: Any) -> bool:
        return value in self.values


@dataclass(frozen=True)
class IsNot:
    """Holds where a key has another value than this one."""

    key: str
    value: Any

    def of_key(self, key: str) -> "IsNot":
        return IsNot(key, self.value)

    def holds(self, value: Any) -> bool:
        return value != self.value


@dataclass(frozen=True)
class IsOn:
    """Holds where a switch is true.

    A switch that was set to false by hand is no reason to complain of the keys that hang on it: so a recipe can be run
    without a technique. One that nobody touched was probably forgotten.
    """

    key: str

    def of_key(self, key: str) -> "IsOn":
        return IsOn(key)

    def holds(self, value: Any) -> bool:
        return value is True


Condition = Is | IsNot | IsOn


@dataclass(frozen=True, init=False)
class ActsIf:
    """The key is read only where one of the conditions holds. Of several `ActsIf` of a field all must hold.

    conditions: on keys of the same section by their last name, on others by their dotted name.
    """

    conditions: tuple[Condition, ...]

    def __init__(self, *conditions: Condition) -> None:
        object.__setattr__(self, "conditions", conditions)


class OnResume:
    """Marks a key, or all keys of a section, whose value may differ from the run that wrote a checkpoint.

    It changes where and how fast the run computes, what it writes and when it stops, but not what is learned: layout
    and memory (results do not depend on how a batch is cut), servers, time-outs, evaluation.
    """


T = TypeVar("T")
WhileEnabled = Annotated[T, ActsIf(IsOn("enable"))]
MayChangeOnResume = Annotated[T, OnResume()]
