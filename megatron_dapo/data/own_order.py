"""The order of prompts by a class of the user's own (`data.curriculum`): an iterator with a state."""

import json
from collections.abc import Sequence
from operator import index
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.own_function import OwnFunction, having
from megatron_dapo.data.samples import Prompt

KEY = "data.curriculum"
_METHODS = ("__next__", "note_rate", "state_dict", "load_state_dict")


class OwnOrder:
    """A cursor (`prompt_cursor.Cursor`) over the user's iterator of numbers of prompts."""

    def __init__(self, path: str, prompts: Sequence[Prompt], seed: int, content: str) -> None:
        """Make the user's object of all prompts and the seed. content: a hash of the prompts.

        UserError is raised here, or by the methods, for an exception of the user's code and for
        another answer.
        """
        make = OwnFunction.load(KEY, path, "package.module:Class")
        needed = f"an object with {', '.join(_METHODS)}"
        order = make(having(*_METHODS), needed, "this run", tuple(prompts), seed)  # whose numbers are their places
        self._methods = {name: OwnFunction(KEY, f"{path}.{name}", getattr(order, name)) for name in _METHODS}
        self._num_prompts = len(prompts)
        self._num_drawn = 0
        self._identity = {"own_order": path, "content": content}
        self.load_state_dict(self.state_dict())  # a failure now, not when the run resumes

    def next(self, count: int) -> list[int]:
        """Return the next `count` numbers."""
        needed = f"a number from 0 to {self._num_prompts - 1}"
        drawn = [self._methods["__next__"](self._number, needed, "a prompt") for _ in range(count)]
        self._num_drawn += count
        return drawn

    def _number(self, answer: Any) -> int:
        if not 0 <= (number := index(answer)) < self._num_prompts:
            raise ValueError(answer)
        return number

    def note_rate(self, number: int, rate: float) -> None:
        """Take in the share of right responses to a prompt."""
        self._methods["note_rate"](lambda answer: None, "without an error", f"prompt {number}", number, rate)

    def passes(self) -> dict[str, float]:
        """Return the number of draws per prompt."""
        return {"epoch": self._num_drawn / self._num_prompts}

    def state_dict(self) -> dict[str, Any]:
        """Return plain data: a copy, since the object goes on."""
        state = self._methods["state_dict"](_plain, "values of JSON (keys are texts)", "this run")
        return {**self._identity, "num_drawn": self._num_drawn, "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. Raises UserError, before any change, for an unfit one."""
        if any(state.get(name) != value for name, value in self._identity.items()):
            raise UserError(
                f"{KEY} is {self._identity['own_order']}, but the checkpoint was written with another order or other "
                f"prompts; restore them, or begin anew with trainer.accept_missing=[controller]."
            )
        self._methods["load_state_dict"](lambda answer: None, "without an error", "the checkpoint", state["state"])
        self._num_drawn = state["num_drawn"]


def _plain(state: Any) -> Any:
    """Return a copy, with lists for tuples. Raises TypeError or ValueError if JSON has no such value."""
    if isinstance(state, dict):
        return {key + "": _plain(each) for key, each in state.items()}  # JSON would make texts of numbers
    if isinstance(state, list | tuple):
        return [_plain(each) for each in state]
    return json.loads(json.dumps(state, allow_nan=False))
