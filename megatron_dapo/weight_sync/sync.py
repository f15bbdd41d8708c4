"""A push of the trainer's weights to every server, stage after stage, under one deadline."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from megatron_dapo.config import WeightSyncConfig
from megatron_dapo.platform import ParallelLayout
from megatron_dapo.weight_sync.agreement import Agreement, Phases, Stopwatch
from megatron_dapo.weight_sync.checksum import checksum, server_parameters, server_tensor
from megatron_dapo.weight_sync.errors import WeightSyncError
from megatron_dapo.weight_sync.plan import Plan, Source, plan_for
from megatron_dapo.weight_sync.sender import Sender
from megatron_dapo.weight_sync.servers import Deadline, ServerCalls, ServerControl, answering, begin, set_going

Result = TypeVar("Result")

RESERVE_S = 8.0
"""Seconds at the end of the deadline that are kept for a failure: to find out who is missing, to tell all ranks, and
to set the surviving servers going (CLEANUP_SHARE of it). At most half of the deadline."""

CLEANUP_SHARE = 0.4


@dataclass(frozen=True)
class SyncReport:
    """One push. seconds: per phase, in the order of the phases; gather and send are summed over the stages."""

    version: int
    seconds: dict[str, float]
    num_bytes: int
    num_tensors: int
    num_buckets: int
    num_servers: int
    rejoined: bool
    num_verified: int


class WeightSync:
    """Pushes one pipeline stage's weights to the servers, together with the other stages'. All trainer ranks take part.

    source: this stage's weights. servers: the same on all ranks; used on rank 0, which leads, and on the source rank of
    each stage (`layout.is_source`), which sends. num_kv_heads: of the model, needed for
    `verify` where a server has more tensor-parallel ranks than that.
    """

    def __init__(
        self,
        source: Source,
        servers: Sequence[ServerControl],
        layout: ParallelLayout,
        config: WeightSyncConfig,
        device: torch.device,
        num_kv_heads: int | None = None,
    ) -> None:
        """Collective over all ranks. Raises WeightSyncError when ranks of a stage would not plan alike."""
        self._source, self._layout, self._config, self._device = source, layout, config, device
        self._num_kv_heads = num_kv_heads
        self._reserve_s = min(RESERVE_S, config.timeout_s / 2)
        self._plan: Plan = plan_for(device, source.specs(), config.bucket_size_mb)
        self._agreement = Agreement(config.timeout_s)
        self._gathers, is_source = layout.gathers, layout.is_source
        self._leads = layout.rank == 0
        assert is_source or not self._leads, "rank 0 is the source rank of stage 0"
        self._calls = ServerCalls(servers) if is_source else None
        self._sender = Sender(layout.pp_rank, self._calls, self._plan, device) if is_source else None
        self._left: list[str] | None = None  # the versions that the last push left on the servers
        self._check_plans(config.timeout_s)

    def push(self, version: int) -> SyncReport:
        """Send the weights as `version` and see every server confirm it. Collective over all ranks.

        Raises WeightSyncError, the same on every rank, within `weight_sync.timeout_s` (after all ranks have come).
        Servers that live are then set going again, with weights that are undefined until a push succeeds.
        """
        watch = Stopwatch()
        self._meet(version)
        watch.lap("wait")
        timeout_s = self._config.timeout_s
        work, tell = Deadline(timeout_s - self._reserve_s), Deadline(timeout_s - CLEANUP_SHARE * self._reserve_s)
        try:
            return self._push(version, watch, work, tell)
        except WeightSyncError:
            self._give_up()
            raise

    def close(self) -> None:
        """Leave the groups and end the connections."""
        if self._sender is not None:
            self._sender.leave()
            self._calls.close()

    def _push(self, version: int, watch: Stopwatch, work: Deadline, tell: Deadline) -> SyncReport:
        layout, phases = self._layout, Phases(self._agreement, self._layout.rank, tell, watch)
        versions, sizes = phases.step("pause", self._lead(self._open, work))[0]
        rejoin = self._left is None or versions != self._left
        # one stage after the other, joining as well as sending: a server takes part in one collective at a time, and
        # two servers that began with different stages would wait for each other
        for stage in range(layout.pp) if rejoin else ():
            mine = self._sender is not None and stage == layout.pp_rank
            phases.step(f"join (stage {stage})", partial(self._sender.join, sizes, work) if mine else None)
        totals = []
        for stage in range(layout.pp):
            mine = self._gathers and stage == layout.pp_rank
            totals += phases.step(f"send (stage {stage})", partial(self._send, version, work) if mine else None)
        left = phases.step("commit", self._lead(partial(self._commit, version), work))[0]
        num_verified = self._verify(version, phases, work) if self._config.verify else 0
        phases.step("resume", self._lead(self._resume, work))
        self._left = left
        sent = [total for total in totals if total is not None]
        return self._report(version, watch, sent, len(sizes), rejoin, num_verified)

    def _lead(self, call: Callable[[Deadline], Result], deadline: Deadline) -> Callable[[], Result] | None:
        """What rank 0 does, and nobody else."""
        return partial(call, deadline) if self._leads else None

    def _check_plans(self, timeout_s: float) -> None:
        mine = (self._layout.pp_rank, self._plan.digest(), self._plan.names)
        plans = self._agreement.exchange("plan", mine, None, timeout_s)
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
        versions = self._agreement.exchange("wait", version, None, self._config.timeout_s)
        if len(set(versions)) != 1:
            raise WeightSyncError(f"wait: the trainer's ranks push different versions: {versions}")

    def _open(self, deadline: Deadline) -> tuple[list[str], list[int]]:
        """Pause every server and open a session; their versions and sizes."""
        # what is left of the deadline must suffice for the push, so a restarting server gets half of it
        found = self._calls.all("pause", deadline, partial(answering, timeout_s=deadline.left() / 2))
        self._calls.all("pause", deadline, lambda server: server.pause())
        self._calls.all("begin", deadline, begin)
        return [version for version, _ in found], [size for _, size in found]

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

    def _commit(self, version: int, deadline: Deadline) -> list[str]:
        """Close the sessions and read the version back."""
        self._calls.all("end", deadline, lambda server: server.end_weight_update())
        versions = self._calls.all("read back", deadline, lambda server: server.weight_version())
        wrong = [
            f"server {u} reports version {v}"
            for u, v in zip(self._calls.urls, versions, strict=True)
            if str(v) != str(version)
        ]
        if wrong:
            raise WeightSyncError(f"read back: pushed version {version}, but {'; '.join(wrong)}")
        return [str(v) for v in versions]

    def _checksums(self, deadline: Deadline) -> dict[str, list[dict[str, str]]]:
        sums = self._calls.all("verify", deadline, lambda server: server.checksums())
        return dict(zip(self._calls.urls, sums, strict=True))

    def _verify(self, version: int, phases: Phases, deadline: Deadline) -> int:
        """Compare a sample of parameters on every server with the trainer's; how many."""
        sums = phases.step("verify (read)", self._lead(self._checksums, deadline))[0]
        counts = phases.step("verify (compare)", partial(self._compare, version, sums) if self._gathers else None)
        return sum(count for count in counts if count is not None)

    def _compare(self, version: int, sums: dict[str, list[dict[str, str]]]) -> int:
        """This stage's share of the sample. Collective over the stage's ranks that gather."""
        parameters = server_parameters(self._source.specs())
        share = -(-self._config.verify_num_tensors // self._layout.pp)
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

    def _resume(self, deadline: Deadline) -> None:
        self._calls.all("resume", deadline, lambda server: server.continue_())

    def _give_up(self) -> None:
        """Drop the groups and set the surviving servers going; what cannot be reached stays as it is."""
        self._left = None
        if self._sender is not None:
            self._sender.abandon()
        if self._leads:
            self._calls.failures(CLEANUP_SHARE * self._reserve_s, set_going)

    def _report(
        self, version: int, watch: Stopwatch, totals: list[dict], num_servers: int, rejoined: bool, num_verified: int
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
            rejoined=rejoined,
            num_verified=num_verified,
        )
