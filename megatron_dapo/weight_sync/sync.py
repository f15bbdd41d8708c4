"""A push of the trainer's weights to the servers that are there, stage after stage, under one deadline."""

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from megatron_dapo.common.errors import MissingRanksError
from megatron_dapo.common.sizes import ceil_div
from megatron_dapo.config.schema.run import WeightSyncConfig
from megatron_dapo.platform.agreement import Agreement, Deadline
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.weight_sync.checksum import checksum, server_parameters, server_tensor
from megatron_dapo.weight_sync.errors import WeightSyncError
from megatron_dapo.weight_sync.plan import Plan, Source, plan_for
from megatron_dapo.weight_sync.sender import Sender
from megatron_dapo.weight_sync.servers import (
    BACKGROUND_S,
    PROBE_S,
    Call,
    Entrant,
    ServerCalls,
    ServerControl,
    blame,
    come_back,
    enter,
    set_going,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")

RESERVE_S = 8.0
"""Seconds at the end of the deadline that are kept for a failure: to find out who is missing (PROBE_SHARE of it, and
LAST_SHARE), to tell all ranks, and to set the surviving servers going (CLEANUP_SHARE). At most half of the deadline."""

PROBE_SHARE = 0.25

CLEANUP_SHARE = 0.4

LAST_SHARE = 0.2
"""Of the reserve: what servers get at least to close their sessions, to be compared and to go on, when sending took all
the time. Three of these, or one and the probe, end where CLEANUP_SHARE begins."""

ENTER_S = 20.0
"""Who has not paused and opened a session by then is left out of a push. At most a quarter of the deadline."""

MIN_REPEAT_S = 1.0


@dataclass(frozen=True)
class SyncReport:
    """One push. seconds: per phase, in the order of the phases; gather and send are summed over the stages.

    num_servers: those that confirmed the version. num_rejoins: those of them that did not hold the last push's.
    """

    version: int
    seconds: dict[str, float]
    num_bytes: int
    num_tensors: int
    num_buckets: int
    num_servers: int
    num_rejoins: int
    rejoined: bool
    num_verified: int


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


class _Phases:
    """The steps of one push, timed. The seconds count to the step's first word."""

    def __init__(self, agreement: Agreement, watch: Stopwatch) -> None:
        self._agreement, self._watch = agreement, watch

    def step(self, step: str, work: Callable[[], Result] | None) -> list[Result | None]:
        results = self._agreement.all(step, lambda: work() if work is not None else None)
        self._watch.lap(step.partition(" ")[0])
        return results


class WeightSync:
    """Pushes one pipeline stage's weights to the servers, together with the other stages'. All trainer ranks take part.

    source: this stage's weights. urls: of the servers there are now, asked on rank 0, which leads, before every push.
    connect: URL -> how the server there is asked, on the source rank of each stage (`layout.is_source`), which sends.
    num_kv_heads: of the model, needed for `verify` where a server has more tensor-parallel ranks than that.
    report_unresponsive: called on rank 0 with the servers (URL -> why) that were left out: they may be stuck for long,
    over NCCL as members of a group in which another one died.
    """

    def __init__(
        self,
        source: Source,
        urls: Callable[[], Sequence[str]],
        connect: Callable[[str], ServerControl],
        layout: ParallelLayout,
        config: WeightSyncConfig,
        device: torch.device,
        num_kv_heads: int | None = None,
        report_unresponsive: Callable[[dict[str, str]], None] = lambda why: None,
    ) -> None:
        """Collective over all ranks. Raises WeightSyncError when ranks of a stage would not plan alike."""
        self._source, self._layout, self._config, self._device = source, layout, config, device
        self._urls, self._num_kv_heads = urls, num_kv_heads
        self._reserve_s = min(RESERVE_S, config.timeout_s / 2)
        self._plan: Plan = plan_for(device, source.specs(), config.bucket_size_mb)
        self._agreement = Agreement.of_all_ranks(config.timeout_s, WeightSyncError)
        self._gathers, is_source = layout.gathers, layout.is_source
        self._leads = layout.rank == 0
        assert is_source or not self._leads, "rank 0 is the source rank of stage 0"
        self._calls = ServerCalls(connect) if is_source else None
        probe_s = min(PROBE_S, PROBE_SHARE * self._reserve_s)
        self._sender = Sender(layout.pp_rank, self._calls, self._plan, device, probe_s) if is_source else None
        self._report_unresponsive = report_unresponsive
        self._going: dict[str, Call] = {}  # servers that are being set going while nobody waits
        # the same on all ranks: who is in the groups, and who confirmed the last push, of which version
        self._group: dict[str, int] | None = None
        self._confirmed: list[str] = []
        self._version: str | None = None
        self._check_plans()

    def push(self, version: int) -> SyncReport:
        """Send the weights as `version` to the servers that are there, and see each confirm it. Collective.

        A server that is lost meanwhile is left out, and named in the log; the others get the weights within the same
        deadline. With no server left the report says 0. Raises WeightSyncError, the same on every rank, within
        `weight_sync.timeout_s` (after all ranks have come), for a failure that no lost server explains. Servers that
        live are then set going again; one that got only some of the weights bears the version that it had before.
        """
        watch = Stopwatch()
        self._meet(version)
        watch.lap("wait")
        timeout_s = self._config.timeout_s
        work, tell = Deadline(timeout_s - self._reserve_s), Deadline(timeout_s - CLEANUP_SHARE * self._reserve_s)
        phases = _Phases(self._agreement.until(tell), watch)
        try:
            servers, rejoined, sent = self._deliver(version, phases, work)
            confirmed = phases.step("commit", self._lead(partial(self._commit, version, list(servers)), work))[0]
            num_verified = self._verify(version, confirmed, phases, work) if self._config.verify and confirmed else 0
            phases.step("resume", self._lead(partial(self._resume, confirmed), work))
        except (WeightSyncError, MissingRanksError):
            self._give_up()
            raise
        if self._sender is not None:
            self._sender.forget(confirmed)
        num_rejoins = self._num_rejoins(version, servers, confirmed)
        self._confirmed, self._version = confirmed, str(version)
        return self._report(version, watch, sent, len(confirmed), num_rejoins, rejoined, num_verified)

    def close(self) -> None:
        """Leave the groups and end the connections."""
        if self._sender is not None:
            self._sender.close()
            self._calls.close()

    def _deliver(
        self, version: int, phases: _Phases, deadline: Deadline
    ) -> tuple[dict[str, Entrant], bool, list[dict[str, float]]]:
        """The servers that have all weights now, whether groups were formed, and what each stage sent."""
        lost: list[str] = []
        may_repeat = True
        while may_repeat and (servers := phases.step("pause", self._lead(partial(self._enter, lost), deadline))[0]):
            try:
                rejoined = self._join(servers, phases, _attempt(deadline, servers))
                return servers, rejoined or bool(lost), self._send_all(version, phases, _attempt(deadline, servers))
            except WeightSyncError as failure:
                gone, may_repeat = self._recover(list(servers), failure, phases, deadline)
                lost += gone
        self._drop_groups()
        return {}, False, []

    def _join(self, servers: dict[str, Entrant], phases: _Phases, deadline: Deadline) -> bool:
        """Form the groups anew where other servers take part than are in them, or one was started again; whether."""
        sizes = {url: entrant.size for url, entrant in servers.items()}
        if sizes == self._group and all(entrant.version == self._version for entrant in servers.values()):
            return False
        self._group = None
        # one stage after the other, joining as well as sending: a server takes part in one collective at a time, and
        # two servers that began with different stages would wait for each other
        for stage in range(self._layout.pp):
            mine = self._sender is not None and stage == self._layout.pp_rank
            phases.step(f"join (stage {stage})", partial(self._sender.join, sizes, deadline) if mine else None)
        self._group = sizes
        return True

    def _send_all(self, version: int, phases: _Phases, deadline: Deadline) -> list[dict[str, float]]:
        """All stages' weights; seconds and counts of each."""
        totals = []
        for stage in range(self._layout.pp):
            mine = self._gathers and stage == self._layout.pp_rank
            totals += phases.step(f"send (stage {stage})", partial(self._send, version, deadline) if mine else None)
        return [total for total in totals if total is not None]

    def _recover(
        self, urls: Sequence[str], failure: WeightSyncError, phases: _Phases, deadline: Deadline
    ) -> tuple[list[str], bool]:
        """After a failed attempt: the servers that were lost in it, and whether time is left to repeat the push. Raises
        the failure where none was lost, or where no time is left for those that were not."""
        self._drop_groups()
        lost, may_repeat = phases.step("recover", self._lead(partial(self._lost, urls), deadline))[0]
        if not lost or (not may_repeat and len(lost) < len(urls)):
            raise failure
        if self._leads:
            then = "the push is repeated" if may_repeat else "the push is over, without a server"
            log.warning("weight sync: left out %s; %s. %s", ", ".join(lost), then, failure)
        return lost, may_repeat

    def _lost(self, urls: Sequence[str], deadline: Deadline) -> tuple[list[str], bool]:
        """Which of these servers do not come back, and whether time is left for another attempt."""
        limit_s = min(CLEANUP_SHARE * self._reserve_s, self._at_least(deadline.left()))
        _, failures = self._calls.ask(urls, come_back, limit_s)
        self._set_going_meanwhile(failures)
        return list(failures), deadline.left() > MIN_REPEAT_S

    def _drop_groups(self) -> None:
        """At once: servers that wait in a collective are freed."""
        self._group = None
        if self._sender is not None:
            self._sender.abandon()

    def _lead(self, call: Callable[[Deadline], Result], deadline: Deadline) -> Callable[[], Result] | None:
        """What rank 0 does, and nobody else."""
        return partial(call, deadline) if self._leads else None

    def _check_plans(self) -> None:
        mine = (self._layout.pp_rank, self._plan.digest(), self._plan.names)
        plans = self._agreement.all("plan", lambda: mine)
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

    def _meet(self, version: int) -> None:
        versions = self._agreement.all("wait", lambda: version)
        if len(set(versions)) != 1:
            raise WeightSyncError(f"wait: the trainer's ranks push different versions: {versions}")

    def _enter(self, lost: Sequence[str], deadline: Deadline) -> dict[str, Entrant]:
        """Pause the servers there are, but for those that were lost in this push, and open a session on each; by URL,
        those that did so in time."""
        urls = [url for url in self._urls() if url not in lost]
        for url in urls:
            if (call := self._going.pop(url, None)) is not None:
                call.answer.cancel()  # it would close the session that is opened now
        limit_s = min(ENTER_S, self._config.timeout_s / 4, deadline.left())
        entrants, failures = self._calls.ask(urls, enter, limit_s)
        self._left_out("pause", failures)
        self._set_going_meanwhile(failures)  # one may have paused
        return {url: entrants[url] for url in urls if url in entrants}

    def _left_out(self, phase: str, failures: dict[str, str]) -> None:
        if failures:
            log.warning("weight sync: %s: left out %s", phase, blame(failures))

    def _set_going_meanwhile(self, failures: dict[str, str]) -> None:
        """Returns at once. The next push stops what is still under way then."""
        self._report_unresponsive(failures)
        self._going |= {call.url: call for call in self._calls.start(failures, set_going, BACKGROUND_S)}

    def _at_least(self, limit_s: float) -> float:
        """A time limit that is never so short that no server could keep it: the reserve gives what lacks."""
        return max(limit_s, LAST_SHARE * self._reserve_s)

    def _send(self, version: int, deadline: Deadline) -> dict[str, float] | None:
        """Gather bucket k+1 while bucket k is sent. Seconds and counts on the source rank."""
        last_stage = self._layout.pp_rank == self._layout.pp - 1
        num_buckets = len(self._plan.buckets)
        watch, transfer, failure = Stopwatch(), None, None
        for index, bucket in enumerate(self._plan.buckets):
            tensors = self._source.gather(list(bucket.specs))
            # a sender that failed goes on gathering: its peers are in the same collectives
            if self._sender is None or failure is not None:
                continue
            try:
                payload = self._sender.pack(index, bucket, tensors)
                watch.lap("gather")
                if transfer is not None:
                    self._sender.settle(transfer, deadline)
                what = f"send (stage {self._layout.pp_rank}, bucket {index + 1} of {num_buckets})"
                last = last_stage and index == num_buckets - 1
                transfer = self._sender.start(what, bucket, payload, version, last, deadline)
            except WeightSyncError as error:
                failure = error
            watch.lap("send")
        if self._sender is None:
            return None
        if failure is not None:
            raise failure
        if transfer is not None:
            self._sender.settle(transfer, deadline)
        watch.lap("send")
        sizes = {"bytes": self._plan.num_bytes, "tensors": self._plan.num_tensors, "buckets": num_buckets}
        return {**watch.seconds, **sizes}

    def _commit(self, version: int, urls: Sequence[str], deadline: Deadline) -> list[str]:
        """Close the sessions and read the version back; the servers that answer. The others bear the version too, and
        are set going."""

        async def finish(server: ServerControl) -> str:
            await server.end_weight_update()
            return str(await server.weight_version())

        versions, failures = self._calls.ask(urls, finish, self._at_least(deadline.left() / 2))
        self._left_out("commit", failures)
        self._set_going_meanwhile(failures)
        wrong = [f"server {url} reports version {held}" for url, held in versions.items() if held != str(version)]
        if wrong:
            raise WeightSyncError(f"read back: pushed version {version}, but {'; '.join(wrong)}")
        return list(versions)

    def _checksums(self, urls: Sequence[str], deadline: Deadline) -> dict[str, list[dict[str, str]]]:
        sums, failures = self._calls.ask(urls, lambda server: server.checksums(), self._at_least(deadline.left() / 2))
        self._left_out("verify", failures)
        return sums

    def _verify(self, version: int, urls: Sequence[str], phases: _Phases, deadline: Deadline) -> int:
        """Compare a sample of parameters on every server with the trainer's; how many."""
        sums = phases.step("verify (read)", self._lead(partial(self._checksums, urls), deadline))[0]
        if not sums:
            return 0
        counts = phases.step("verify (compare)", partial(self._compare, version, sums) if self._gathers else None)
        return sum(count for count in counts if count is not None)

    def _compare(self, version: int, sums: dict[str, list[dict[str, str]]]) -> int:
        """This stage's share of the sample. Collective over the stage's ranks that gather."""
        parameters = server_parameters(self._source.specs())
        share = ceil_div(self._config.verify_num_tensors, self._layout.pp)
        names = random.Random(version).sample(sorted(parameters), min(share, len(parameters)))
        wrong = []
        for name in names:
            specs = parameters[name]
            tensors = self._source.gather(list(specs))
            if self._sender is not None:
                equal = partial(self._equal, name, specs, [tensor.to(self._device) for tensor in tensors])
                wrong += [f"{name} on server {url}" for url, ranks in sums.items() if not equal(ranks)]
        if wrong:
            raise WeightSyncError(f"verify: version {version} differs from the trainer's weights: {', '.join(wrong)}")
        return len(names) if self._sender is not None else 0

    def _equal(self, name: str, specs: Sequence, tensors: Sequence, ranks: list[dict[str, str]]) -> bool:
        expected = (
            checksum(server_tensor(specs, tensors, rank, len(ranks), self._num_kv_heads)) for rank in range(len(ranks))
        )
        return all(theirs.get(name) == ours for theirs, ours in zip(ranks, expected, strict=True))

    def _resume(self, urls: Sequence[str], deadline: Deadline) -> None:
        _, failures = self._calls.ask(urls, lambda server: server.continue_(), self._at_least(deadline.left()))
        self._left_out("resume", failures)
        self._set_going_meanwhile(failures)

    def _give_up(self) -> None:
        """Drop the groups and set the surviving servers going; what cannot be reached stays as it is."""
        self._drop_groups()
        if self._leads:
            _, failures = self._calls.ask(self._urls(), set_going, CLEANUP_SHARE * self._reserve_s)
            self._report_unresponsive(failures)

    def _num_rejoins(self, version: int, servers: dict[str, Entrant], confirmed: Sequence[str]) -> int:
        """Servers that hold the weights now and did not hold those of the last push."""
        if self._version is None:
            return 0
        held = (self._version, str(version))  # the second one: where the push had to be repeated
        return sum(url not in self._confirmed or servers[url].version not in held for url in confirmed)

    def _report(
        self,
        version: int,
        watch: Stopwatch,
        totals: list[dict],
        num_servers: int,
        num_rejoins: int,
        rejoined: bool,
        num_verified: int,
    ) -> SyncReport:
        seconds = {}
        for phase, value in watch.seconds.items():
            split = ("gather", "send") if phase == "send" else ()
            seconds |= {part: sum(total.get(part, 0.0) for total in totals) for part in split} or {phase: value}
        return SyncReport(
            version=version,
            seconds=seconds,
            num_bytes=sum(int(total["bytes"]) for total in totals),
            num_tensors=sum(int(total["tensors"]) for total in totals),
            num_buckets=sum(int(total["buckets"]) for total in totals),
            num_servers=num_servers,
            num_rejoins=num_rejoins,
            rejoined=rejoined,
            num_verified=num_verified,
        )


def _attempt(work: Deadline, servers: Collection[str]) -> Deadline:
    """How long an attempt may take: half of what is left where there are others to repeat it with, if one freezes."""
    return Deadline(work.left() / 2 if len(servers) > 1 else work.left())
