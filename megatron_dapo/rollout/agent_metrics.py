"""Counts of the agents' trajectories of a step, and means of their own numbers."""

import re
from collections import Counter
from collections.abc import Mapping

from megatron_dapo.agents.turns import COUNTS

_MAX_NAMES = 32  # of the agents' own numbers in a step
_LARGEST = 1e30
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,47}", re.ASCII)
_COUNTED = (*COUNTS, "undelivered", "twins", "lost", "restarts", "errors")
_OWN = {*(f"num_{name}" for name in _COUNTED), "tool_s", "rows", "rows_max"}


class AgentMetrics:
    """Running sums; `take` ends a step."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._sums: dict[str, tuple[float, int]] = {}  # name -> sum, number of trajectories

    def count(self, numbers: Mapping[str, int]) -> None:
        """Add counts, by the names of `COUNTS` and of this module."""
        self._counts.update(numbers)

    def add(self, tool_s: float, own: Mapping[str, float]) -> None:
        """Add a finished trajectory.

        tool_s: seconds without a request. own: the agent's numbers, from anywhere; those that are
        none, or have no plain name, are left out, and so are further names once there are 32.
        """
        self._add("tool_s", tool_s)
        for name, value in own.items():
            is_number = type(value) in (int, float, bool) and abs(value) <= _LARGEST  # not NaN
            if is_number and name not in _OWN and _NAME.fullmatch(name):
                self._add(name, float(value))

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        counts = {f"agent/num_{name}": self._counts[name] for name in _COUNTED}
        means = {f"agent/{name}": total / number for name, (total, number) in self._sums.items()}
        self._counts.clear()
        self._sums.clear()
        return counts | means

    def _add(self, name: str, value: float) -> None:
        if name in self._sums or len(self._sums) <= _MAX_NAMES:
            total, number = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, number + 1
