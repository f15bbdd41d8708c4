"""Steps that all ranks end alike: with the results, or with the same error.

Nobody waits for a failed rank.
"""

import copy
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch.distributed as dist

from megatron_dapo.common.addresses import node_name
from megatron_dapo.common.errors import (
    JobError,
    MissingRanksError,
    RankFailure,
    SharedError,
    SharedUserError,
    UserError,
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_SHORTEST_WAIT_S = 0.1
# torch's message, on rank 0 only
_LATE_RANKS = re.compile(r"Ranks ([\d, ]+) failed to pass monitoredBarrier")


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds until then, not below 0."""
        return max(0.0, self._end - time.monotonic())


@dataclass(frozen=True)
class _Outcome(Generic[Result]):
    """The result of a rank's part of a step."""

    result: Result | None = None
    error: Exception | None = None
    """A UserError or an error of the agreement's own kind, raised unchanged."""
    failure: str | None = None
    """Any other error, on one line."""

    @property
    def text(self) -> str | None:
        """Return the error's text, or None after success."""
        return self.failure if self.error is None else str(self.error)


class Agreement:
    """All ranks of a group, which go through the steps of a job together.

    Every method is collective: all ranks call it at the same point. rank: this rank; size: the
    number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float, error: type[SharedError] = JobError) -> None:
        """Gather the ranks' host names.

        Args:
            group: over gloo; None: the default group.
            timeout_s: how long a step waits for the other ranks after this rank's part is done.
            error: the kind to raise if a part failed.
        """
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._error = error
        self._seconds_left: Callable[[], float] = lambda: timeout_s
        self._hosts: list[str] = self.gather(node_name())

    @classmethod
    def of_all_ranks(cls, timeout_s: float, error: type[SharedError] = JobError) -> "Agreement":
        """Make a gloo group of all ranks of the job for it, with this time limit."""
        return cls(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)), timeout_s, error)

    def until(self, deadline: Deadline) -> "Agreement":
        """Return the same agreement with another limit: its steps wait for the others until the
        deadline."""
        limited = copy.copy(self)
        limited._seconds_left = deadline.left
        return limited

    def raising(self, error: type[SharedError]) -> "Agreement":
        """Return the same agreement with another error for a part that failed."""
        other = copy.copy(self)
        other._error = error
        return other

    def all(
        self, step: str, fn: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> list[Result]:
        """Have every rank call fn, which must not be collective itself; return all results, in rank
        order.

        If fn raised on any rank, all ranks raise the same error: a SharedUserError with the
        sentences of all UserErrors, if any. Else it is an error of the agreement's kind, unchanged;
        else a new one with the names of step, ranks and hosts.

        Raises:
            MissingRanksError: if a rank does not come.
        """
        outcome, cause = _attempt(self._error, fn, *args, **kwargs)
        self._wait_for_all(step, outcome)
        outcomes = self.gather(outcome)
        self._raise_failures(step, outcomes, cause)
        return [cast(Result, each.result) for each in outcomes]

    def each(
        self, step: str, fn: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Have every rank call fn; return this rank's result, which is not sent. Raises like
        `all`."""
        outcome, cause = _attempt(self._error, fn, *args, **kwargs)
        self._wait_for_all(step, outcome)
        self._raise_failures(step, self.gather(replace(outcome, result=None)), cause)
        return cast(Result, outcome.result)

    def leader(
        self, step: str, fn: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Have rank 0 call fn; return its result on all ranks. Raises as `all` does."""
        outcome: _Outcome[Result] = _Outcome()
        cause: Exception | None = None
        if self.rank == 0:
            outcome, cause = _attempt(self._error, fn, *args, **kwargs)
        self._wait_for_all(step, outcome)
        box = [outcome]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self._group)
        self._raise_failures(step, box, cause)
        return cast(Result, box[0].result)

    def gather(self, value: Any) -> list:
        """Return every rank's value, in rank order, on all of them."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _wait_for_all(self, step: str, outcome: _Outcome) -> None:
        """Wait until all ranks come to this step, in a monitored barrier: the only collective that
        names missing ranks."""
        if self.size == 1:
            return
        limit_s = max(self._seconds_left(), _SHORTEST_WAIT_S)
        try:
            dist.monitored_barrier(self._group, timedelta(seconds=limit_s), wait_all_ranks=True)
        except RuntimeError as failure:
            late = _LATE_RANKS.search(str(failure))
            missing = tuple(int(rank) for rank in late[1].split(",")) if late else ()
            if missing:
                names = ", ".join(f"rank {rank} on {self._hosts[rank]}" for rank in missing)
                text = f"{step}: {names} timed out after {limit_s:.1f} s, or closed the connection"
            else:
                text = f"{step}: rank 0 on {self._hosts[0]}, or one that it waits for, is missing: {describe(failure)}"
            raise MissingRanksError(f"{outcome.text}; moreover, {text}" if outcome.text else text, missing) from failure

    def _raise_failures(self, step: str, outcomes: Sequence[_Outcome], cause: Exception | None) -> None:
        """Raise one error for all failed parts, if any. cause: the exception of this rank's
        part."""
        mistakes = [each.error for each in outcomes if isinstance(each.error, UserError)]
        if mistakes:
            sentences = [sentence for mistake in mistakes for sentence in mistake.sentences]
            details = dict.fromkeys(mistake.details for mistake in mistakes if mistake.details)
            raise SharedUserError(dict.fromkeys(sentences), "\n".join(details)) from cause
        errors = {str(each.error): each.error for each in outcomes if each.error is not None}
        failures = [
            RankFailure(rank, self._hosts[rank], each.failure)
            for rank, each in enumerate(outcomes)
            if each.failure is not None
        ]
        if len(errors) == 1 and not failures:
            [error] = errors.values()
            raise cause or error
        texts = list(errors)
        if failures:
            texts.append("; ".join([f"{step} failed", *map(str, failures)]))
        if texts:
            raise self._error("; ".join(texts), step, failures) from cause


class SingleRank(Agreement):
    """The agreement of a job of one process."""

    def __init__(self, error: type[SharedError] = JobError) -> None:
        self.rank = 0
        self.size = 1
        self._group = None
        self._error = error
        self._seconds_left = lambda: 0.0
        self._hosts = [node_name()]


def _attempt(
    kind: type[SharedError], fn: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> tuple[_Outcome[Result], Exception | None]:
    """Return the call's outcome and its exception."""
    try:
        return _Outcome(result=fn(*args, **kwargs)), None
    except (UserError, kind) as error:
        return _Outcome(error=error), error
    except Exception as error:  # all ranks raise it
        return _Outcome(failure=describe(error)), error


def describe(error: BaseException) -> str:
    """Return an error on one line, in the operating system's words if an OSError caused it.

    torch reports a full disk as a wrong position in a file.
    """
    began: BaseException | None = error
    while began is not None and not isinstance(began, OSError):
        began = began.__cause__ or began.__context__
    text = " ".join(str(began or error).split()) or type(error).__name__
    return text if began is not None else f"{type(error).__name__}: {text}"
