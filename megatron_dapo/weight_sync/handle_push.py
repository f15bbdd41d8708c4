"""Pushes the trainer's weights to servers on its own GPUs, by handles.

NCCL takes no two ranks on one GPU, so there is no group with the servers. A bucket goes to all
trainer ranks instead, and each hands the server rank on its GPU a handle of its copy. The rank on
the GPU of a server's first rank collects the handles and posts them.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config.schema.run import WeightSyncConfig
from megatron_dapo.platform.agreement import Deadline
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.weight_sync.buckets import Bucket, Source, handle_plan
from megatron_dapo.weight_sync.handles import ServerPlace, collect_handles, prepare_handles, serialized
from megatron_dapo.weight_sync.push import Delivery, Push, WeightPush
from megatron_dapo.weight_sync.sender import check_gathered, fill
from megatron_dapo.weight_sync.servers import UNFINISHED_VERSION, ServerCalls, ServerControl
from megatron_dapo.weight_sync.shared_leader import SharedLeader
from megatron_dapo.weight_sync.stage import StageTotals, Stopwatch, comparing_role, whole
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

POST_S = 20.0
"""Seconds for a server to load a bucket, or a quarter of what a push has left, if that is more."""


class HandlePush(WeightPush):
    """Pushes to servers on the trainer's GPUs, which sleep before and sample afterwards.

    Args:
        source: this stage's weights.
        servers: rank 0's.
        places: of all servers.
        make_room: frees the memory of this rank's weights, before the servers take theirs back.
        phase: times a phase of a push, and reports it to the watchdog.
    """

    def __init__(
        self,
        source: Source,
        servers: SharedLeader,
        calls: ServerCalls,
        places: Sequence[ServerPlace],
        layout: ParallelLayout,
        config: WeightSyncConfig,
        device: torch.device,
        make_room: Callable[[], None],
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Plan the buckets of all stages. Collective over all ranks. Raises as WeightPush does."""
        plan = handle_plan(device, source.specs(), config.bucket_size_mb)
        stage = comparing_role(source, plan, layout, config, device)
        super().__init__(servers, calls, stage, plan, layout, config, phase)
        self._agreement.each("import of SGLang", prepare_handles)
        known = self._agreement.gather((layout.pp_rank, layout.rank, plan) if layout.is_source else None)
        # of each stage, in their order: source rank and plan
        self._plans = [(rank, plan) for _, rank, plan in sorted(filter(None, known), key=lambda each: each[0])]
        self._source = source
        self._device = device
        self._make_room = make_room
        [self._place] = [place for place in places if layout.rank in place.ranks]
        ranks = [list(place.ranks) for place in places]
        self._group, _ = dist.new_subgroups_by_enumeration(ranks, timedelta(seconds=config.timeout_s), backend="gloo")

    @property
    def _is_poster(self) -> bool:
        return self._layout.rank == self._place.poster

    def _deliver(self, push: Push) -> Delivery:
        steps = push.agreement
        members = steps.leader("wake", self._servers.pause, (), push.deadline)
        push.watch.lap("wake")
        if not members:
            return Delivery({}, False, [])
        sent = steps.all("send", self._send, members, push.version, push.deadline)
        push.watch.lap("send")
        lost = {url: why for _, url, why in sent if why is not None}
        steps.leader("leave out", self._servers.leave_out, "send", lost)
        versions = {url: member.version for url, member in members.items() if url not in lost}
        plans = [plan for _, plan in self._plans]
        totals = StageTotals(
            sent[0][0],  # all ranks send at the same time
            num_bytes=sum(plan.num_bytes for plan in plans),
            num_tensors=sum(plan.num_tensors for plan in plans),
            num_buckets=sum(len(plan.buckets) for plan in plans),
        )
        return Delivery(versions, bool(lost), [totals])

    def _after_transfer(self, push: Push) -> None:
        push.agreement.each("park", self._free_weights)
        push.watch.lap("park")

    def _free_weights(self) -> None:
        collect_handles()  # those that the servers let go at the end of the session
        self._make_room()

    def _send(
        self, members: Collection[str], version: int, deadline: Deadline
    ) -> tuple[dict[str, float], str, str | None]:
        """Send all stages' weights to the server on this rank's GPU, if it is a member. Collective.

        The last bucket brings the version; until then the server reports UNFINISHED_VERSION.
        Return the seconds of gathering and of sending, the server's URL, and why it failed.
        Raises WeightSyncError for a gathered tensor unlike its plan, after all collectives.
        """
        watch = Stopwatch()
        why: str | None = None
        fault: WeightSyncError | None = None
        buckets = [(stage, bucket) for stage, (_, plan) in enumerate(self._plans) for bucket in plan.buckets]
        for number, (stage, bucket) in enumerate(buckets, start=1):
            flat, wrong = self._everywhere(stage, bucket)
            fault = fault or wrong
            watch.lap("gather")
            is_last = number == len(buckets)
            if self._place.url in members and why is None:
                why = self._hand_over(flat, bucket, version if is_last else UNFINISHED_VERSION, is_last, deadline)
            watch.lap("send")
            del flat
            collect_handles()
        if fault is not None:
            raise fault
        return watch.seconds, self._place.url, why

    def _everywhere(self, stage: int, bucket: Bucket) -> tuple[Tensor, WeightSyncError | None]:
        """Return this rank's copy of a bucket, and a fault found on the stage's source rank.

        A new buffer each time: a server may still copy from the last one after its answer.
        """
        fault = None
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
        if stage == self._layout.pp_rank and self._layout.gathers:
            tensors = self._source.gather(list(bucket.specs))
            if self._layout.is_source:
                try:
                    check_gathered(bucket, whole(tensors))
                    fill(flat, whole(tensors))
                except WeightSyncError as error:
                    fault = error
        dist.broadcast(flat, self._plans[stage][0])
        if flat.is_cuda:  # the time limit of a post begins with a complete bucket
            torch.cuda.current_stream().synchronize()
        return flat, fault

    def _hand_over(self, flat: Tensor, bucket: Bucket, version: int, flush: bool, deadline: Deadline) -> str | None:
        """Give the server a handle of each rank's copy; return why it failed, on all its ranks.

        The ranks keep their copies until the answer.
        """
        handle = serialized(flat, bucket)
        if len(self._place.ranks) == 1:
            return self._post([handle], version, flush, deadline)
        handles: list[str] | None = [""] * len(self._place.ranks) if self._is_poster else None
        dist.gather_object(handle, handles, dst=self._place.poster, group=self._group)
        outcome = [self._post(handles, version, flush, deadline) if handles else None]
        dist.broadcast_object_list(outcome, src=self._place.poster, group=self._group)
        return outcome[0]

    def _post(self, handles: Sequence[str], version: int, flush: bool, deadline: Deadline) -> str | None:
        assert len(handles) == len(self._place.ranks), "a rank without a handle ends the server"

        async def update(server: ServerControl) -> None:
            await server.update_weights_from_tensor(handles, weight_version=version, flush_cache=flush)

        # all ranks go on together: one silent server must leave time for the others' buckets
        limit_s = max(min(POST_S, deadline.left()), deadline.left() / 4)
        _, failures = self._calls.ask([self._place.url], update, limit_s)
        return failures.get(self._place.url)
