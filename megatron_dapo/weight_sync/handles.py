"""The push on shared GPUs: each rank hands the server rank on its GPU a handle of a bucket there.

NCCL takes no two ranks on one GPU, so there is no group with the servers. A bucket goes to all
trainer ranks instead, and each makes a handle of its copy: CUDA IPC, on a CPU shared memory. The
rank on the GPU of a server's first rank collects them and posts them.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from megatron_dapo.platform.agreement import Deadline
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.weight_sync.buckets import Bucket, Plan, Source
from megatron_dapo.weight_sync.sender import check_gathered, fill
from megatron_dapo.weight_sync.servers import UNFINISHED_VERSION, ServerCalls, ServerControl
from megatron_dapo.weight_sync.stage import StageTotals, Stopwatch, whole
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

POST_S = 20.0
"""Seconds for a server to load a bucket, or a quarter of what a push has left, if that is more."""


@dataclass(frozen=True)
class ServerPlace:
    """The trainer ranks on one server's GPUs, in the order of the server's ranks."""

    url: str
    ranks: tuple[int, ...]

    @property
    def poster(self) -> int:
        """Return the rank that sends the server's requests."""
        return self.ranks[0]


def places(urls: Sequence[str], world_size: int) -> list[ServerPlace]:
    """Return each server's place: they cover the trainer's ranks in their order."""
    size = world_size // len(urls)
    assert size * len(urls) == world_size, f"{len(urls)} servers do not share {world_size} GPUs evenly"
    return [ServerPlace(url, tuple(range(i * size, (i + 1) * size))) for i, url in enumerate(urls)]


@dataclass(frozen=True)
class Sent:
    """A rank's part of a transfer."""

    totals: StageTotals
    lost: dict[str, str]
    """URL -> why, of the server that this rank posts to."""


class HandleSender:
    """This rank's part in sending all stages' buckets. Collective over all ranks."""

    def __init__(
        self,
        source: Source,
        plans: Sequence[Plan],
        source_ranks: Sequence[int],
        place: ServerPlace,
        group: dist.ProcessGroup,
        calls: ServerCalls,
        layout: ParallelLayout,
        device: torch.device,
    ) -> None:
        """Prepare.

        Args:
            source: of this rank's stage.
            plans, source_ranks: of every stage.
            place: of the server on this rank's GPU.
            group: gloo group of the place's ranks.
        """
        self._source = source
        self._plans = plans
        self._source_ranks = source_ranks
        self._place = place
        self._group = group
        self._calls = calls
        self._layout = layout
        self._device = device

    def send(self, members: Collection[str], version: int, deadline: Deadline) -> Sent:
        """Send all weights to the server on this rank's GPU, if it is a member.

        The last bucket brings the version; until then the server reports UNFINISHED_VERSION.
        Raises WeightSyncError for a gathered tensor unlike its plan, after all collectives.
        """
        watch = Stopwatch()
        takes_part, why = self._place.url in members, None
        fault: WeightSyncError | None = None
        for stage, plan in enumerate(self._plans):
            for index, bucket in enumerate(plan.buckets):
                flat, wrong = self._everywhere(stage, bucket)
                fault = fault or wrong
                watch.lap("gather")
                is_last = stage == len(self._plans) - 1 and index == len(plan.buckets) - 1
                if takes_part and why is None:
                    number = version if is_last else UNFINISHED_VERSION
                    why = self._hand_over(flat, bucket, number, is_last, deadline)
                watch.lap("send")
                del flat
                collect_handles()
        if fault is not None:
            raise fault
        is_poster = self._layout.rank == self._place.poster
        return Sent(self._totals(watch.seconds), {self._place.url: why} if why and is_poster else {})

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
        dist.broadcast(flat, self._source_ranks[stage])
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
        is_poster = self._layout.rank == self._place.poster
        handles: list[str] | None = [""] * len(self._place.ranks) if is_poster else None
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

    def _totals(self, seconds: dict[str, float]) -> StageTotals:
        if not self._layout.is_source:
            return StageTotals(seconds, 0, 0, 0)
        own = self._plans[self._layout.pp_rank]
        return StageTotals(seconds, own.num_bytes, own.num_tensors, len(own.buckets))


def make_place_group(all_places: Sequence[ServerPlace], timeout_s: float) -> dist.ProcessGroup:
    """Return a gloo group of the ranks of this rank's place. Collective over all ranks."""
    ranks = [list(place.ranks) for place in all_places]
    group, _ = dist.new_subgroups_by_enumeration(ranks, timedelta(seconds=timeout_s), backend="gloo")
    return group


def prepare_handles() -> None:
    """Import what `serialized` needs of SGLang: not at the top, since only runs with shared GPUs have
    it in the trainer, and not in a push, since it takes seconds."""
    from sglang.srt.utils import MultiprocessingSerializer  # noqa: F401
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata  # noqa: F401

    if torch.cuda.is_available():  # names devices by UUID: processes number visible devices differently
        monkey_patch_torch_reductions()


def serialized(flat: Tensor, bucket: Bucket) -> str:
    """Return a handle of a flat bucket as SGLang's route `update_weights_from_tensor` takes it.

    One per copy and bucket: torch pairs each export of a tensor with one release.
    """
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata = []
    start = 0
    for spec, shape in zip(bucket.specs, bucket.shapes, strict=True):
        size = torch.Size(shape).numel() * spec.dtype.itemsize
        metadata.append(FlattenedTensorMetadata(spec.name, torch.Size(shape), spec.dtype, start, start + size, size))
        start += size
    with _shared_by_name():
        return MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": metadata}, output_str=True)


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share memory of the CPU by name: file descriptors pass only between relatives."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)


def collect_handles() -> None:
    """Free the memory of handles that the servers have let go."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
