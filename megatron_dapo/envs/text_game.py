"""Text games: a place and a task in words, one command per turn, and the result in words.

This file formats the model's input and output; examples/text_games has games.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_dapo.envs.environment import Observation, Task

_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


@dataclass(frozen=True)
class Scene:
    """A game's words."""

    text: str
    commands: tuple[str, ...]
    """The commands it would understand now."""
    won: bool = False
    """Whether the task is done."""
    over: bool = False


class TextGame(Protocol):
    """A game that was started: `reset` begins it, `step` does a command, `close` ends it."""

    def reset(self) -> Scene: ...

    def step(self, command: str) -> Scene: ...

    def close(self) -> None: ...


class TextGameEnvironment:
    """One game per trajectory: reward 1 when it is won, which ends it, else 0.

    start: the game of a task. show_commands: list the admissible actions with every observation.
    """

    def __init__(self, start: Callable[[Task], TextGame], show_commands: bool = True) -> None:
        self._start = start
        self._show_commands = show_commands
        self._game: TextGame | None = None

    async def reset(self, task: Task) -> Observation:
        """Begin the task."""
        self._game = self._start(task)
        return self._observation(self._game.reset())

    async def step(self, response: str) -> Observation:
        """Answer a turn of the model."""
        assert self._game is not None, "reset() comes before step()"
        return self._observation(self._game.step(command_of(response)))

    async def close(self) -> None:
        """End the game."""
        if self._game is not None:
            self._game.close()

    def _observation(self, scene: Scene) -> Observation:
        listed = f"\nAdmissible actions: {', '.join(scene.commands)}." if self._show_commands else ""
        message = {"role": "user", "content": scene.text.strip() + listed}
        return Observation((message,), done=scene.won or scene.over, reward=float(scene.won), correct=scene.won)


def command_of(response: str) -> str:
    """Return the last <action>, or without one the last nonempty line, without a leading ">"."""
    actions = _ACTION.findall(response)
    lines = [line for line in response.splitlines() if line.strip()]
    return (actions or lines or [""])[-1].strip().removeprefix(">").strip()
