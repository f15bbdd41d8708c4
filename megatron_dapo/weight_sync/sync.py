"""Pushes the trainer's weights to the current servers, stage after stage, under one deadline."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from megatron_dapo.config.schema.run import WeightSyncConfig
from megatron_dapo.platform.agreement import Agreement, Deadline
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.weight_sync.buckets import Plan, Source, plan_for
from megatron_dapo.weight_sync.leader import CLEANUP_SHARE, ServerLeader
from megatron_dapo.weight_sync.sender import Sender
from megatron_dapo.weight_sync.servers import PROBE_S, ServerCalls, ServerControl, ServerMember
from megatron_dapo.weight_sync.stage import StageTotals, Stopwatch, stage_role
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

RESERVE_S = 8.0
"""Seconds at the end of the deadline, kept for a failure; at most half of the deadline.

They serve to find the missing servers (PROBE_SHARE of it, and `leader.LAST_SHARE`), to tell all
ranks, and to resume the surviving servers (CLEANUP_SHARE).
"""

PROBE_SHARE = 0.25


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

    def metrics(self, num_rejoins: int) -> dict[str, float]:
        """Return seconds per phase, how many servers have the weights, and how many joined again:
        num_rejoins."""
        servers = {"weight_sync/num_servers": float(self.num_servers), "weight_sync/num_rejoins": float(num_rejoins)}
        return {f"weight_sync/{phase}_s": seconds for phase, seconds in self.seconds.items()} | servers


class NothingPushed:
    """The report of a run without servers."""

    num_rejoins = 0

    def metrics(self, num_rejoins: int) -> dict[str, float]:
        return {}


class NoServers:
    """The weight sync of a run without servers."""

    def push(self, version: int) -> NothingPushed:
        return NothingPushed()

    def close(self) -> None:
        """Do nothing: nothing is open."""


@dataclass(frozen=True)
class _Push:
    """A push under way."""

    version: int
    agreement: Agreement
    """Its deadline includes the time to tell all ranks of a failure."""
    deadline: Deadline
    """Of the work before that."""
    watch: Stopwatch


@dataclass(frozen=True)
class _Delivery:
    """A completed transfer to the servers."""

    versions: dict[str, str]
    """URL -> the server's version before the push."""
    rejoined: bool
    """Whether groups were formed anew."""
    totals: list[StageTotals]


class WeightSync:
    """Pushes one pipeline stage's weights to the servers, together with the other stages'. All
    trainer ranks take part.

    Args:
        source: this stage's weights.
        urls: returns the current servers; called on rank 0, which leads, before every push.
        connect: returns a server's client; called on each stage's source rank (`layout.is_source`),
            which sends.
        report_unresponsive: called on rank 0 with the servers left out (URL -> why); see
            ServerLeader.
        phase: times a phase of a push, and reports it to the watchdog.
    """

    def __init__(
        self,
        source: Source,
        urls: Callable[[], Sequence[str]],
        connect: Callable[[str], ServerControl],
        layout: ParallelLayout,
        config: WeightSyncConfig,
        device: torch.device,
        report_unresponsive: Callable[[dict[str, str]], None] = lambda why: None,
        phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        """Plan the buckets and compare the plans of all ranks. The call is collective over all
        ranks. Raise WeightSyncError when ranks of a stage would not plan alike, or when two stages
        would send the same tensor."""
        self._layout = layout
        self._config = config
        self._phase = phase
        self._reserve_s = min(RESERVE_S, config.timeout_s / 2)
        self._agreement = Agreement.of_all_ranks(config.timeout_s, WeightSyncError)
        self._calls = ServerCalls(connect)
        self._servers = ServerLeader(
            urls, self._calls, config.timeout_s, self._reserve_s, report_unresponsive, config.pause_mode
        )
        plan = plan_for(device, source.specs(), config.bucket_size_mb)
        probe_s = min(PROBE_S, PROBE_SHARE * self._reserve_s)
        self._stage = stage_role(
            source,
            plan,
            layout,
            config,
            lambda: Sender(layout.pp_rank, self._calls, plan, device, probe_s, flushes=config.pause_mode == "retract"),
            device,
        )
        # the same on all ranks: the members of the groups, and the servers that confirmed the last
        # push, with its version
        self._group: dict[str, int] | None = None
        self._confirmed: list[str] = []
        self._version: str | None = None
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
            push = _Push(version, agreement, Deadline(timeout_s - self._reserve_s), watch)
            try:
                delivery = self._deliver(push)
                confirmed = agreement.leader(
                    "commit", self._servers.commit, version, list(delivery.versions), push.deadline
                )
                watch.lap("commit")
                num_verified = self._verify(push, confirmed)
                agreement.leader("resume", self._servers.resume, confirmed, push.deadline)
                watch.lap("resume")
            except Exception:  # a rank may be lost between a barrier and its exchange too
                self._give_up()
                raise
            self._stage.forget(confirmed)
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

    def _deliver(self, push: _Push) -> _Delivery:
        """Send the weights to the current servers; if one is lost meanwhile, again to the
        others."""
        steps = push.agreement
        lost: list[str] = []
        versions: dict[str, str] = {}
        may_repeat = True
        while may_repeat:
            members = steps.leader("pause", self._servers.pause, lost, push.deadline)
            push.watch.lap("pause")
            if not members:
                break
            versions = {url: versions.get(url, member.version) for url, member in members.items()}
            try:
                rejoined = self._join(push, members, _time_for_attempt(push, members))
                deadline = _time_for_attempt(push, members)
                totals: list[StageTotals | None] = []
                for stage in range(self._layout.pp):
                    totals += steps.all(f"send (stage {stage})", self._stage.send, stage, push.version, deadline)
                push.watch.lap("send")
                return _Delivery(versions, rejoined or bool(lost), [total for total in totals if total is not None])
            except WeightSyncError as failure:
                self._drop_groups()
                urls = list(members)
                why = str(failure)
            gone, may_repeat = steps.leader("recover", self._servers.recover, urls, why, push.deadline)
            push.watch.lap("recover")
            lost += gone
        self._drop_groups()
        return _Delivery({}, False, [])

    def _join(self, push: _Push, members: dict[str, ServerMember], deadline: Deadline) -> bool:
        """Form the groups anew if their servers changed, or one was restarted. Return whether that
        was needed."""
        sizes = {url: member.size for url, member in members.items()}
        if sizes == self._group and all(member.version == self._version for member in members.values()):
            return False
        self._group = None
        # one stage after the other, joining as well as sending: a server takes part in one
        # collective at a time, and two servers that began with different stages would wait for each
        # other
        for stage in range(self._layout.pp):
            push.agreement.each(f"join (stage {stage})", self._stage.join, stage, sizes, deadline)
        push.watch.lap("join")
        self._group = sizes
        return True

    def _verify(self, push: _Push, urls: Sequence[str]) -> int:
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

    def _drop_groups(self) -> None:
        """Give the groups up at once: servers that wait in a collective are freed."""
        self._group = None
        self._stage.drop_group()

    def _give_up(self) -> None:
        self._drop_groups()
        if self._layout.rank == 0:
            self._servers.give_up()

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


def _time_for_attempt(push: _Push, members: dict[str, ServerMember]) -> Deadline:
    """Return an attempt's deadline: half of the time left if there are other servers for a second
    attempt, in case one freezes."""
    left = push.deadline.left()
    return Deadline(left / 2 if len(members) > 1 else left)
