"""A rank's work for its pipeline stage in a push: send its weights, help to gather them, or
nothing."""

import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_dapo.common.sizes import ceil_div
from megatron_dapo.config.schema.run import WeightSyncConfig
from megatron_dapo.models.safetensors_files import TensorSpec
from megatron_dapo.platform.agreement import Deadline
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.weight_sync.buckets import Plan, Source
from megatron_dapo.weight_sync.checksum import accepted_tensors, checksum, server_parameters
from megatron_dapo.weight_sync.sender import BUCKETS_IN_FLIGHT, Sender, Transfer
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

Checksums = Mapping[str, Sequence[Mapping[str, str]]]
"""URL -> of each tensor-parallel rank of the server, parameter name -> checksum."""


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


@dataclass(frozen=True)
class StageTotals:
    """A stage's transfer. seconds: of gathering and of sending."""

    seconds: dict[str, float]
    num_bytes: int
    num_tensors: int
    num_buckets: int


class StageRole(Protocol):
    """A rank's part in the pushes of its stage. stage: the current one; calls on other stages'
    ranks do nothing. Methods with a stage, and `compare`, are collective over the gathering ranks.
    """

    def join(self, stage: int, server_sizes: Mapping[str, int], deadline: Deadline) -> None:
        """Form a new group with these servers. server_sizes: URL -> tensor-parallel ranks."""
        ...

    def send(self, stage: int, version: int, deadline: Deadline) -> StageTotals | None:
        """Send all weights of the stage; return the totals on its source rank."""
        ...

    def compare(self, version: int, sums: Checksums) -> int:
        """Compare this stage's share of a sample of parameters with the servers'; return their
        number, on the source rank. Raises WeightSyncError naming the parameters that differ."""
        ...

    def drop_group(self) -> None:
        """Give the group up at once: servers that wait in a collective are freed."""
        ...

    def forget(self, urls: Collection[str]) -> None:
        """Have these servers destroy the groups that were given up."""
        ...

    def close(self) -> None: ...


class _Bystander:
    """The role of a rank with the same slices as another one."""

    def join(self, stage: int, server_sizes: Mapping[str, int], deadline: Deadline) -> None:
        pass

    def send(self, stage: int, version: int, deadline: Deadline) -> StageTotals | None:
        return None

    def compare(self, version: int, sums: Checksums) -> int:
        return 0

    def drop_group(self) -> None:
        pass

    def forget(self, urls: Collection[str]) -> None:
        pass

    def close(self) -> None:
        pass


class _Gatherer(_Bystander):
    """The role of a rank that brings its slices to the stage's source rank."""

    def __init__(self, source: Source, plan: Plan, layout: ParallelLayout, config: WeightSyncConfig) -> None:
        self._source = source
        self._plan = plan
        self._stage = layout.pp_rank
        self._num_stages = layout.pp
        self._num_compared = ceil_div(config.verify_num_tensors, layout.pp)

    def send(self, stage: int, version: int, deadline: Deadline) -> StageTotals | None:
        if stage == self._stage:
            for bucket in self._plan.buckets:
                self._source.gather(list(bucket.specs))
        return None

    def compare(self, version: int, sums: Checksums) -> int:
        for _ in self._samples(version):
            pass
        return 0

    def _samples(self, version: int) -> Iterator[tuple[str, Sequence[TensorSpec], list[Tensor] | None]]:
        """Gather a sample of the servers' parameters, the same on all ranks: name, its tensors
        here, their values."""
        parameters = server_parameters(self._source.specs())
        number = min(self._num_compared, len(parameters))
        for name in random.Random(version).sample(sorted(parameters), number):
            specs = parameters[name]
            yield name, specs, self._source.gather(list(specs))


class _Comparer(_Gatherer):
    """The role of a stage's source rank in a comparison: it has the gathered weights."""

    def __init__(
        self, source: Source, plan: Plan, layout: ParallelLayout, config: WeightSyncConfig, device: torch.device
    ) -> None:
        super().__init__(source, plan, layout, config)
        self._device = device

    def compare(self, version: int, sums: Checksums) -> int:
        wrong: list[str] = []
        num_compared = 0
        for name, specs, tensors in self._samples(version):
            num_compared += 1
            # copies: the checksum reads through NumPy, which then holds the memory of a weight on the CPU
            values = [tensor.to(self._device, copy=self._device.type == "cpu") for tensor in whole(tensors)]
            for url, ranks in sums.items():
                if not self._is_equal(name, specs, values, ranks):
                    wrong.append(f"{name} on server {url}")
        if wrong:
            raise WeightSyncError(f"verify: version {version} differs from the trainer's weights: {', '.join(wrong)}")
        return num_compared

    def _is_equal(
        self, name: str, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], ranks: Sequence[Mapping[str, str]]
    ) -> bool:
        """Return whether each tensor-parallel rank of a server has the checksum of its part of the
        parameter."""
        for rank, sums in enumerate(ranks):
            accepted = accepted_tensors(specs, tensors, rank, len(ranks))
            if not any(sums.get(name) == checksum(tensor) for tensor in accepted):
                return False
        return True


class StageSource(_Comparer):
    """The role of the rank that holds the stage's gathered weights, and sends them."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        layout: ParallelLayout,
        config: WeightSyncConfig,
        sender: Sender,
        device: torch.device,
    ) -> None:
        super().__init__(source, plan, layout, config, device)
        self._sender = sender

    def join(self, stage: int, server_sizes: Mapping[str, int], deadline: Deadline) -> None:
        if stage == self._stage:
            self._sender.join(server_sizes, deadline)

    def send(self, stage: int, version: int, deadline: Deadline) -> StageTotals | None:
        """Gather, copy and announce the next bucket during the broadcast of the current one.

        Two buckets are in flight (BUCKETS_IN_FLIGHT): the group begins the next broadcast right
        after the last one, without the servers' answers. This is sound because every server takes
        part in the broadcasts in the same order. SGLang's handler of a request receives and loads
        its bucket before it answers; it holds a lock meanwhile, and its scheduler has one thread.
        Requests arrive in order, because each server gets them over one connection
        (RequestPipeline), and are taken up in that order. The end of a broadcast on this side would
        not prove that all servers have begun it: other servers forward it, and NCCL has buffers.

        The last bucket waits for the answers to all others. It brings the version, which a server
        that refused a bucket must not take: that server would receive this one's bytes for the
        next.
        """
        if stage != self._stage:
            return None
        watch = Stopwatch()
        failure: WeightSyncError | None = None
        in_flight: deque[Transfer] = deque()
        num_buckets = len(self._plan.buckets)
        for index, bucket in enumerate(self._plan.buckets):
            what = f"send (stage {stage}, bucket {index + 1} of {num_buckets})"
            is_last = stage == self._num_stages - 1 and index == num_buckets - 1
            try:
                tensors = self._source.gather(list(bucket.specs))
                if failure is not None:  # goes on gathering: its peers are in the same collectives
                    continue
                watch.lap("gather")
                self._settle(in_flight, BUCKETS_IN_FLIGHT - 1, deadline)  # frees a buffer
                watch.lap("send")
                payload = self._sender.pack(index, bucket, whole(tensors))
                watch.lap("gather")
                if is_last:
                    self._settle(in_flight, 0, deadline)
                in_flight.append(self._sender.start(what, bucket, payload, version, is_last, deadline))
            except WeightSyncError as error:
                failure = failure or error
            watch.lap("send")
        if failure is not None:
            raise failure
        self._settle(in_flight, 0, deadline)
        watch.lap("send")
        return StageTotals(watch.seconds, self._plan.num_bytes, self._plan.num_tensors, num_buckets)

    def _settle(self, in_flight: deque[Transfer], num_left: int, deadline: Deadline) -> None:
        """Wait until all but the last num_left of these buckets have arrived, and take the others
        out."""
        while len(in_flight) > num_left:
            self._sender.settle(in_flight.popleft(), deadline)

    def drop_group(self) -> None:
        self._sender.abandon()

    def forget(self, urls: Collection[str]) -> None:
        self._sender.forget(urls)

    def close(self) -> None:
        self._sender.close()


def stage_role(
    source: Source,
    plan: Plan,
    layout: ParallelLayout,
    config: WeightSyncConfig,
    make_sender: Callable[[], Sender],
    device: torch.device,
) -> StageRole:
    """Return this rank's part in the pushes of its stage. make_sender: called on the source rank
    only."""
    if layout.is_source:
        return StageSource(source, plan, layout, config, make_sender(), device)
    return comparing_role(source, plan, layout, config, device)


def comparing_role(
    source: Source, plan: Plan, layout: ParallelLayout, config: WeightSyncConfig, device: torch.device
) -> StageRole:
    """Return this rank's part in comparing its stage's weights with the servers'."""
    if layout.is_source:
        return _Comparer(source, plan, layout, config, device)
    return _Gatherer(source, plan, layout, config) if layout.gathers else _Bystander()


def whole(tensors: list[Tensor] | None) -> list[Tensor]:
    """Return gathered tensors, on a source rank."""
    assert tensors is not None, "the stage's source rank has the tensors whole"
    return tensors
