"""The protocol of a push of weights: what all ways of sending them have in common."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from megatron_dapo.config.schema.run import WeightSyncConfig
from megatron_dapo.platform.agreement import Agreement, Deadline
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.weight_sync.buckets import Plan
from megatron_dapo.weight_sync.leader import CLEANUP_SHARE, ServerLeader
from megatron_dapo.weight_sync.servers import ServerCalls
from megatron_dapo.weight_sync.stage import StageRole, StageTotals, Stopwatch
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

RESERVE_S = 8.0
"""Seconds at the end of the deadline, kept for a failure; at most half of the deadline.

They serve to find the missing servers (`sync.PROBE_SHARE` of it, and `leader.LAST_SHARE`), to tell
all ranks, and to resume the surviving servers (CLEANUP_SHARE).
"""


@dataclass(frozen=True)
class SyncReport:
    """The result of a push."""

    version: int
    seconds: dict[str, float]
    """Per phase, in order; gather and send are summed over the stages."""
    num_bytes: int
    num_tensors: int
    num_buckets: int
    num_servers: int
    """Servers that confirmed the version."""
    num_rejoins: int
    """Of these, the servers that did not hold the last push's version."""
    rejoined: bool
    num_verified: int
    moved_bytes: int = 0
    """On shared GPUs, of a rank's memory to the host and back, since the last push."""
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    """On shared GPUs, of rank 0's: used with servers asleep, kept by the parked trainer."""
    fp8_error: float | None = None
    """Of weights sent as FP8 blocks, relative: see `fp8_source.relative_error`."""

    def metrics(self, num_rejoins: int) -> dict[str, float]:
        """Return seconds per phase, how many servers have the weights, how many joined again
        (num_rejoins), gigabytes moved, and the error of FP8 blocks."""
        servers = {"weight_sync/num_servers": float(self.num_servers), "weight_sync/num_rejoins": float(num_rejoins)}
        moved = {"weight_sync/moved_gb": self.moved_bytes / 1e9} if self.moved_bytes else {}
        held = {f"weight_sync/{name}_gb": number / 1e9 for name, number in self.held_bytes.items()}
        error = {} if self.fp8_error is None else {"weight_sync/fp8_relative_error": self.fp8_error}
        seconds = {f"weight_sync/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        return seconds | servers | moved | held | error


class NothingPushed:
    """The report of a run without servers."""

    num_rejoins = 0

    def metrics(self, num_rejoins: int) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Push:
    """A push under way."""

    version: int
    agreement: Agreement
    """Its deadline includes the time to tell all ranks of a failure."""
    deadline: Deadline
    """Of the work before that."""
    watch: Stopwatch


@dataclass(frozen=True)
class Delivery:
    """A completed transfer to the servers."""

    versions: dict[str, str]
    """URL -> the server's version before the push."""
    rejoined: bool
    """Whether groups were formed anew."""
    totals: list[StageTotals]


class WeightPush:
    """Pushes one pipeline stage's weights to the servers, together with the other stages'. All
    trainer ranks take part.

    Args:
        servers: on rank 0, which leads.
        stage: compares this stage's weights with the servers'.
        phase: times a phase of a push, and reports it to the watchdog.
    """

    def __init__(
        self,
        servers: ServerLeader,
        calls: ServerCalls,
        stage: StageRole,
        plan: Plan,
        layout: ParallelLayout,
        config: WeightSyncConfig,
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Compare the plans of all ranks. Raise WeightSyncError when ranks of a stage would not
        plan alike, or when two stages would send the same tensor."""
        self._agreement = Agreement.of_all_ranks(config.timeout_s, WeightSyncError)
        self._servers = servers
        self._calls = calls
        self._stage = stage
        self._layout = layout
        self._config = config
        self._phase = phase
        self._reserve_s = reserve_s(config)
        self._confirmed: list[str] = []  # servers of the last push, the same on all ranks
        self._version: str | None = None  # of the last push
        self._check_plans(plan)

    def push(self, version: int) -> SyncReport:
        """Send the weights as `version` to the current servers, and have each confirm it.
        Collective.

        A server lost meanwhile is left out, and named in the log; the others get the weights within
        the same deadline. Without any server left the report says 0. After a failure living servers
        resume; one with only some of the weights reports UNFINISHED_VERSION.

        Raises:
            WeightSyncError: the same on every rank, within `weight_sync.timeout_s` (after all ranks
                have come), for a failure that no lost server explains.
        """
        with self._phase("weight_sync"):
            watch = Stopwatch()
            self._require_same_version(version)
            watch.lap("wait")
            timeout_s = self._config.timeout_s
            agreement = self._agreement.until(Deadline(timeout_s - CLEANUP_SHARE * self._reserve_s))
            push = Push(version, agreement, Deadline(timeout_s - self._reserve_s), watch)
            try:
                delivery = self._deliver(push)
                confirmed = agreement.leader(
                    "commit", self._servers.commit, version, list(delivery.versions), push.deadline
                )
                watch.lap("commit")
                num_verified = self._verify(push, confirmed)
                self._after_transfer(push)
                agreement.leader("resume", self._servers.resume, confirmed, push.deadline)
                watch.lap("resume")
            except Exception:  # a rank may be lost between a barrier and its exchange too
                self._give_up()
                raise
            self._forget(confirmed)
            num_rejoins = self._num_rejoins(delivery.versions, confirmed)
            self._confirmed = confirmed
            self._version = str(version)
            return SyncReport(
                version=version,
                seconds=_seconds(watch, delivery.totals),
                num_bytes=sum(total.num_bytes for total in delivery.totals),
                num_tensors=sum(total.num_tensors for total in delivery.totals),
                num_buckets=sum(total.num_buckets for total in delivery.totals),
                num_servers=len(confirmed),
                num_rejoins=num_rejoins,
                rejoined=delivery.rejoined,
                num_verified=num_verified,
            )

    def close(self) -> None:
        """Leave the groups and end the connections."""
        self._stage.close()
        self._calls.close()

    def _deliver(self, push: Push) -> Delivery:
        """Prepare the current servers and send them the weights."""
        raise NotImplementedError

    def _after_transfer(self, push: Push) -> None:
        """Do what must come between the transfer and the servers' next token."""

    def _forget(self, confirmed: Collection[str]) -> None:
        """Have these servers drop what is left of failed attempts."""

    def _give_up(self) -> None:
        if self._layout.rank == 0:
            self._servers.give_up()

    def _verify(self, push: Push, urls: Sequence[str]) -> int:
        """Compare a sample of parameters on every server with the trainer's. Returns how many."""
        if not (self._config.verify and urls):
            return 0
        sums = push.agreement.leader("verify (read)", self._servers.checksums, urls, push.deadline)
        push.watch.lap("verify")
        if not sums:
            return 0
        counts = push.agreement.all("verify (compare)", self._stage.compare, push.version, sums)
        push.watch.lap("verify")
        return sum(counts)

    def _check_plans(self, plan: Plan) -> None:
        stage_plan = (self._layout.pp_rank, plan.digest(), plan.names)
        plans = self._agreement.all("plan", lambda: stage_plan)
        first: dict[int, tuple[int, str]] = {}
        for rank, (stage, digest, _) in enumerate(plans):
            other, expected = first.setdefault(stage, (rank, digest))
            if digest != expected:
                raise WeightSyncError(f"plan: trainer ranks {other} and {rank} of stage {stage} list different tensors")
        owner: dict[str, int] = {}
        for rank, _ in first.values():
            stage, _, names = plans[rank]
            for name in names:
                if owner.setdefault(name, stage) != stage:
                    raise WeightSyncError(f"plan: stages {owner[name]} and {stage} both send {name}")

    def _require_same_version(self, version: int) -> None:
        versions = self._agreement.all("wait", lambda: version)
        if len(set(versions)) != 1:
            raise WeightSyncError(f"wait: the trainer's ranks push different versions: {versions}")

    def _num_rejoins(self, versions: dict[str, str], confirmed: Sequence[str]) -> int:
        """Return the number of servers that hold the weights now and did not hold those of the last
        push."""
        if self._version is None:
            return 0
        return sum(url not in self._confirmed or versions[url] != self._version for url in confirmed)


def reserve_s(config: WeightSyncConfig) -> float:
    """Return the end of a push's deadline that is kept for a failure, in seconds."""
    return min(RESERVE_S, config.timeout_s / 2)


def _seconds(watch: Stopwatch, totals: Sequence[StageTotals]) -> dict[str, float]:
    """Return the seconds of each phase; `send` is replaced by the stages' times to gather and to
    send."""
    seconds: dict[str, float] = {}
    for phase, value in watch.seconds.items():
        if phase == "send":
            for part in ("gather", "send"):
                seconds[part] = sum(total.seconds.get(part, 0.0) for total in totals)
        else:
            seconds[phase] = value
    return seconds
