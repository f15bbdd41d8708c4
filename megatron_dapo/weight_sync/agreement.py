"""How the trainer's ranks tell one another how a phase went, so that all go on or all raise the same error."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from megatron_dapo.weight_sync.errors import RanksMissing, WeightSyncError
from megatron_dapo.weight_sync.servers import Deadline, reason

Result = TypeVar("Result")


class Agreement:
    """Exchanges among all trainer ranks, over a gloo group of their own."""

    def __init__(self, timeout_s: float) -> None:
        """Collective over all ranks. timeout_s bounds every exchange."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._size = dist.get_world_size()

    def exchange(self, phase: str, payload: object, error: str | None, timeout_s: float) -> list:
        """Everybody's payload, in rank order. Raises WeightSyncError with the errors of all ranks that report one, or
        RanksMissing naming the ranks that did not come within timeout_s (seconds)."""
        reports: list = [None] * self._size
        try:
            # the barrier names who is missing, which no other collective does
            dist.monitored_barrier(self._group, timedelta(seconds=max(timeout_s, 0.1)), wait_all_ranks=True)
            dist.all_gather_object(reports, (error, payload), group=self._group)
        except RuntimeError as failure:
            where = f"{error}; moreover, " if error else ""
            raise RanksMissing(f"{where}{phase}: not all trainer ranks came: {failure}") from failure
        errors = dict.fromkeys(theirs for theirs, _ in reports if theirs is not None)
        if errors:
            raise WeightSyncError("; ".join(errors))
        return [theirs for _, theirs in reports]


class Stopwatch:
    """Adds up seconds per phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._mark = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to this phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._mark
        self._mark = now


class Phases:
    """The steps of one push: each is done by the ranks that have something to do and ends when all know how it went."""

    def __init__(self, agreement: Agreement, rank: int, deadline: Deadline, watch: Stopwatch) -> None:
        self._agreement, self._rank, self._deadline, self._watch = agreement, rank, deadline, watch

    def step(self, phase: str, mine: Callable[[], Result] | None) -> list[Result | None]:
        """Everybody's result, in rank order; `mine` is None on ranks that only listen. Raises WeightSyncError on all
        ranks when it failed on any. The seconds count to the phase's first word."""
        result, error = None, None
        try:
            result = mine() if mine is not None else None
        except WeightSyncError as failure:
            error = str(failure)
        except Exception as failure:  # every rank raises it
            error = f"{phase}: trainer rank {self._rank}: {reason(failure)}"
        results = self._agreement.exchange(phase, result, error, self._deadline.left())
        self._watch.lap(phase.partition(" ")[0])
        return results
