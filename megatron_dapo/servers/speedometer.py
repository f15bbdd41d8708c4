"""A server's speed, from the counters of its work."""

from dataclasses import dataclass
from typing import Any

from megatron_dapo.servers.fleet import TOKEN_TIME, next_factor

_MIN_STEPS = 50
"""Steps of a measurement: one of them may hold the time of a prompt."""


@dataclass(frozen=True)
class WorkDone:
    """A server's work since its start. Two of them tell the work in between."""

    num_steps: float  # in which each running request wrote tokens
    num_requests: float  # running ones, summed over the steps
    num_tokens: float  # written
    seconds: float  # of the steps
    num_read: float  # tokens of prompts, without cached ones

    @classmethod
    def of(cls, loads: list[dict[str, Any]]) -> "WorkDone | None":
        """Return the work of all replicas of SGLang's `/v1/loads`; None if it is not counted there.

        SGLang counts steps that follow another such step within 2 s: no pause lies between. The
        first step after a prompt counts with the prompt's time if it was scheduled before its end.
        """
        if not loads or any("decode_moments" not in load for load in loads):
            return None
        num_steps, num_requests, microseconds, _, _, num_tokens = (
            sum(column) for column in zip(*(load["decode_moments"] or (0.0,) * 6 for load in loads), strict=True)
        )
        num_read = sum(load["total_prefill_uncached_tokens"] for load in loads)
        return cls(num_steps, num_requests, num_tokens, microseconds / 1e6, num_read)

    def since(self, before: "WorkDone") -> "WorkDone":
        """Return the work since an earlier moment."""
        return WorkDone(*(now - then for now, then in zip(vars(self).values(), vars(before).values(), strict=True)))

    @property
    def factor(self) -> float | None:
        """Return the server's factor while it did this work; None if it wrote nothing."""
        if min(self.num_steps, self.num_requests, self.num_tokens, self.seconds) <= 0:
            return None
        return TOKEN_TIME.factor(round(self.num_requests / self.num_steps), self.num_tokens / self.seconds)


@dataclass(frozen=True)
class Load:
    """A server at one moment."""

    kv_used: float  # share of its cache in use by its requests
    requests_used: float  # share of the requests that it runs at once; states of delta nets bound them
    work: WorkDone | None

    @classmethod
    def of(cls, answer: Any) -> "Load":
        """Return the load of an answer of `/v1/loads`. Cached prefixes of earlier requests do not
        count as used: they make room when it is needed.

        Raises KeyError, TypeError, ValueError or ZeroDivisionError for another answer.
        """
        loads = answer["loads"]
        capacity = sum(load["max_total_num_tokens"] for load in loads)
        most = sum(load["max_running_requests"] for load in loads)
        num_running = sum(load["num_running_reqs"] for load in loads)
        kv_used = sum(load["num_used_tokens"] for load in loads) / capacity
        return cls(kv_used, num_running / most, WorkDone.of(loads))


class Speedometer:
    """The factor of one server, from look to look, and the looks at which it stood still."""

    def __init__(self) -> None:
        self.factor: float | None = None  # None: not measured yet
        self.work: WorkDone | None = None  # newest one
        # looks in a row between which it did nothing for its requests, outside a pause; none before
        # its first step, which may wait for compilations
        self.num_silent = 0
        self._is_new = False  # since the last look
        self._before: WorkDone | None = None  # at the last look
        self._measured: WorkDone | None = None  # at the newest measurement

    def note(self, work: WorkDone | None) -> None:
        """Note its counters."""
        self.work = work
        self._is_new = work is not None

    def look(self, usual: float | None, *, has_requests: bool, has_old_ones: bool) -> None:
        """Look at the work since the last look, and measure the speed once it is enough.

        Args:
            usual: the usual server's factor.
            has_requests: now; without any it counts as a little more usual.
            has_old_ones: requests from before the last look, and no push: it ought to have written.
        """
        if not has_requests:
            self.num_silent = 0
            self.factor = next_factor(self.factor, None, usual)
        if not self._is_new or self.work is None:
            return
        before, self._before, self._is_new = self._before, self.work, False
        done = self.work.since(before or self.work)
        if done.num_steps > 0 or done.num_read > 0:
            self.num_silent = 0
        elif before == self.work:
            self.num_silent = self.num_silent + 1 if has_old_ones and self.work.num_steps > 0 else 0
        if self._measured is None or done.num_steps < 0:  # it began anew
            self._measured = self.work
        done = self.work.since(self._measured)
        if done.num_steps >= _MIN_STEPS and done.factor:
            self._measured = self.work
            self.factor = next_factor(self.factor, done.factor, usual)
