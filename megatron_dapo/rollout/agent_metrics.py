"""Counts of the agents' trajectories of a step, and means of their own numbers."""

import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from megatron_dapo.agents.turns import COUNTS

# as the gateways saw it; of trajectories; of tokens written and not trained on
_COUNTS = (*COUNTS, "restarts", "errors", "tokens_undelivered", "tokens_twins", "tokens_lost")
_TOOL_S = "tool_s"
_MAX_NAMES = 32  # of the agents' own numbers in a step
_LARGEST = 1e30
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,47}", re.ASCII)


class AgentMetrics:
    """Running sums; `take` ends a step."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._sums: dict[str, tuple[float, int]] = {}  # name -> sum, number of trajectories

    def add(self, counts: Mapping[str, int], means: Mapping[str, float] = MappingProxyType({})) -> None:
        """Add counts, by the names of `_COUNTS`, and a finished trajectory's numbers.

        means: "tool_s", the seconds without a request, and the agent's own numbers, from anywhere.
        Those that are none, or have no plain name, are left out, and so are further names once
        there are 32.
        """
        self._counts.update(counts)
        for name, value in means.items():
            is_number = type(value) in (int, float, bool) and abs(value) <= _LARGEST  # not NaN
            has_room = name in {*self._sums, _TOOL_S} or len(self._sums.keys() - {_TOOL_S}) < _MAX_NAMES
            if is_number and has_room and _NAME.fullmatch(name):
                total, number = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, number + 1

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call; a count's name is no agent's."""
        means = {f"agent/{name}": total / number for name, (total, number) in self._sums.items()}
        counts = {f"agent/num_{name}": self._counts[name] for name in _COUNTS}
        self._counts.clear()
        self._sums.clear()
        return means | counts
