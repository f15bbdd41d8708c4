"""Functions and classes of the user's own, named by a key: each failure is one sentence with the
key."""

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.import_path import import_attribute

Answer = TypeVar("Answer")

_SHOWN_CHARS = 100
_SHOWN_FRAMES, _MAX_DETAILS = 5, 4000  # the innermost of a traceback, and its characters


@dataclass(frozen=True)
class OwnFunction:
    """A function at `package.module:name`."""

    key: str
    path: str
    function: Callable[..., Any]

    @classmethod
    def load(cls, key: str, path: str, form: str = "package.module:function", name: str | None = None) -> "OwnFunction":
        """Import it; arguments as in `import_attribute`. Raises UserError with one sentence."""
        function = import_attribute(key, path, form, name)
        if not callable(function):
            raise UserError(f"{key}: {name or path!r} is no function but {type(function).__name__}.")
        return cls(key, path, function)

    def __call__(self, read: Callable[[Any], Answer], needed: str, of: str, *arguments: Any) -> Answer:
        """Return the answer to the arguments, as `read` returns it.

        Args:
            read: raises ValueError or TypeError for another answer.
            needed: the answer in words, for the user.
            of: the object of the call in words.

        Raises:
            UserError: for an exception of the function, with its traceback, and for another answer.
        """
        try:
            answer = self.function(*arguments)
        except (Exception, SystemExit) as error:
            failure = f"({type(error).__name__}: {error}); it must return {needed}."
            lines = traceback.format_exc(limit=-_SHOWN_FRAMES)[-_MAX_DETAILS:]
            raise UserError(f"{self.key}: {self.path} failed for {of} {failure}", lines) from error
        try:
            return read(answer)
        except Exception as error:  # the answer may be the user's own object, too
            shown = repr(answer)[:_SHOWN_CHARS]
            raise UserError(f"{self.key}: {self.path} must return {needed} for {of}; it returned {shown}.") from error


def having(*methods: str) -> Callable[[Any], Any]:
    """Return the identity of objects with these methods. It raises AttributeError or TypeError for
    others."""

    def read(answer: Any) -> Any:
        if not all(callable(getattr(answer, method)) for method in methods):
            raise TypeError(answer)
        return answer

    return read


def finite(answer: Any) -> float:
    """Return a number. Raises ValueError or TypeError for anything else, NaN and infinity too."""
    if not math.isfinite(answer):  # it reads no texts, as float does
        raise ValueError(answer)
    return float(answer)
