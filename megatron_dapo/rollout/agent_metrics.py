"""Counts of the agents' trajectories of a step, and means of their own numbers."""

import re
from collections import Counter
from collections.abc import Mapping

_COUNTS = {
    # as the gateway saw it (`agents.turns.COUNTS`)
    "ill_formed": "agent/num_ill_formed",
    "retokenized": "agent/num_retokenized",
    "refused": "agent/num_refused",
    "overruled": "agent/num_overruled",
    "retries": "agent/num_retries",
    # of trajectories
    "restarts": "agent/num_restarts",
    "errors": "agent/num_errors",
    # of tokens written and not trained on
    "undelivered": "agent/num_tokens_undelivered",
    "twins": "agent/num_tokens_twins",
    "lost": "agent/num_tokens_lost",
}
_TOOL_S = "agent/tool_s"
_TAKEN = {*_COUNTS.values(), _TOOL_S}
_MAX_NAMES = 32  # of the agents' own numbers in a step
_LARGEST = 1e30
_NAME = re.compile(r"agent/[A-Za-z0-9][A-Za-z0-9_.@-]{0,47}", re.ASCII)


class AgentMetrics:
    """Running sums; `take` ends a step."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._means: dict[str, tuple[float, int]] = {}  # metric -> sum, number of trajectories

    def count(self, numbers: Mapping[str, int]) -> None:
        """Add counts, by the names of `_COUNTS`."""
        self._counts.update(numbers)

    def add(self, tool_s: float, own: Mapping[str, float]) -> None:
        """Add a finished trajectory.

        tool_s: seconds without a request. own: the agent's numbers, from anywhere; those that are
        none, or have no plain name, are left out, and so are further names once there are 32.
        """
        self._add(_TOOL_S, tool_s)
        for name, value in own.items():
            metric = f"agent/{name}"
            is_number = type(value) in (int, float, bool) and abs(value) <= _LARGEST  # not NaN
            if is_number and metric not in _TAKEN and _NAME.fullmatch(metric):
                self._add(metric, float(value))

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        counts = {metric: self._counts[name] for name, metric in _COUNTS.items()}
        means = {metric: total / number for metric, (total, number) in self._means.items()}
        self._counts.clear()
        self._means.clear()
        return counts | means

    def _add(self, metric: str, value: float) -> None:
        if metric in self._means or len(self._means) <= _MAX_NAMES:
            total, number = self._means.get(metric, (0.0, 0))
            self._means[metric] = total + value, number + 1
