"""Tools: the model writes a call and reads the result that the environment gives, until it answers
without a call."""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from megatron_dapo.envs.environment import Observation, Task

Tool = Callable[..., str]


class ToolEnvironment:
    """Tools, called between `call_open` and `call_close`; a turn without a call is the answer, and
    ends the trajectory.

    A call is a JSON object with name and arguments, as Qwen and Hermes models write it, or, for a
    single tool, the bare text of its one argument. result: the template of the model's next input,
    with {} for the tool's answer. role: the role of that message. The environment gives no reward:
    the reward function scores the whole text.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        call_open: str = "<tool_call>",
        call_close: str = "</tool_call>",
        result: str = "{}",
        role: str = "tool",
    ) -> None:
        if not (call_open and call_close and "{}" in result):
            raise ValueError("call_open and call_close need text, and result a {}")
        self._tools = tools
        self._call_open = call_open
        self._call_close = call_close
        self._result = result
        self._role = role

    async def reset(self, task: Task) -> Observation:
        """Begin the task."""
        return Observation()

    async def step(self, response: str) -> Observation:
        """Answer a turn of the model."""
        calls = _find_calls(response, self._call_open, self._call_close)
        answers = (self._result.replace("{}", self._run(call)) for call in calls)
        messages = tuple({"role": self._role, "content": answer} for answer in answers)
        return Observation(messages, done=not calls)

    async def close(self) -> None:
        """Do nothing, because nothing is open."""

    def _run(self, call: str) -> str:
        """Return the tool's answer, or the fault of the call: the model can read it and try
        again."""
        try:
            name, arguments = self._parsed(call)
            if name not in self._tools:
                return f"error: no tool {name!r}; there is {', '.join(self._tools)}"
            return str(self._tools[name](**arguments))
        except (ValueError, TypeError, ArithmeticError) as error:
            return f"error: {error}"

    def _parsed(self, call: str) -> tuple[str, dict[str, Any]]:
        if not call.lstrip().startswith("{"):
            if len(self._tools) != 1:
                raise ValueError("a call is a JSON object with name and arguments")
            ((name, tool),) = self._tools.items()
            return name, {next(iter(inspect.signature(tool).parameters)): call.strip()}
        fields = json.loads(call)
        arguments = fields.get("arguments", {})
        if not isinstance(arguments, dict):
            raise ValueError("the arguments of a call are a JSON object")
        return str(fields.get("name")), arguments


def _find_calls(text: str, call_open: str, call_close: str) -> list[str]:
    """Return the text between the marks, in order; an unclosed call reaches to the end."""
    return [part.partition(call_close)[0] for part in text.split(call_open)[1:]]
