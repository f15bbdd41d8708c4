"""Rules on a key's field besides its type: the keys it depends on, and changes on resume.

Both are metadata of `typing.Annotated`, on the field of a key or of a whole section.
`config/keys.py` collects them, `checks/unused_keys.py` and `checkpointing/config_changes.py` act on
them, docs/config.md shows them.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar


@dataclass(frozen=True, init=False)
class Is:
    """Condition: a key has one of these values."""

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
    """Condition: a key has a value other than this one."""

    key: str
    value: Any

    def of_key(self, key: str) -> "IsNot":
        return IsNot(key, self.value)

    def holds(self, value: Any) -> bool:
        return value != self.value


@dataclass(frozen=True)
class IsOn:
    """Condition: a switch is true.

    For a switch set to false on purpose, its section's keys are no mistake: a recipe can run
    without a technique. An untouched switch was probably forgotten.
    """

    key: str

    def of_key(self, key: str) -> "IsOn":
        return IsOn(key)

    def holds(self, value: Any) -> bool:
        return value is True


Condition = Is | IsNot | IsOn


@dataclass(frozen=True, init=False)
class ActsIf:
    """Rule: the key is read only if one of the conditions holds.

    Of a field's several `ActsIf` all must hold.
    """

    conditions: tuple[Condition, ...]
    """On keys of the same section by their last name, on others by their dotted name."""

    def __init__(self, *conditions: Condition) -> None:
        object.__setattr__(self, "conditions", conditions)


class OnResume:
    """Mark on a key or section: its value may differ from the checkpoint's run.

    Such keys change the place, speed, output and end of a run, but nothing it learns: layout and
    memory (results do not depend on the cut of a batch), servers, time-outs, evaluation.
    """


T = TypeVar("T")
WhileEnabled = Annotated[T, ActsIf(IsOn("enable"))]
MayChangeOnResume = Annotated[T, OnResume()]
