"""The calculator, hanging once in a run: in the first call about a training problem,
burning CPU."""

import os

from examples.calculator.environment import Calculator
from examples.calculator.problems import split
from megatron_dapo.envs.environment import Observation, Task


class StuckCalculator(Calculator):
    """marker: a file created by the hanging process; its content is the process id."""

    def __init__(self, marker: str, **format: str) -> None:
        super().__init__(**format)
        self._marker = marker
        self._held_out = {problem.prompt for problem in split()[1]}
        self._is_training = False

    async def reset(self, task: Task) -> Observation:
        self._is_training = task.prompt not in self._held_out
        return await super().reset(task)

    async def step(self, response: str) -> Observation:
        if self._is_training and "(" in response and self._is_first():
            while True:
                pass
        return await super().step(response)

    def _is_first(self) -> bool:
        try:
            with open(self._marker, "x", encoding="utf-8") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return False
        return True
