"""Pushes the trainer's weights to servers on its own GPUs, by handles."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from megatron_dapo.config.schema.run import WeightSyncConfig
from megatron_dapo.platform.agreement import Agreement
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.weight_sync.buckets import Source, handle_plan
from megatron_dapo.weight_sync.handles import (
    HandleSender,
    ServerPlace,
    collect_handles,
    make_place_group,
    prepare_handles,
)
from megatron_dapo.weight_sync.push import Delivery, Push, WeightPush
from megatron_dapo.weight_sync.servers import ServerCalls
from megatron_dapo.weight_sync.shared_leader import SharedLeader
from megatron_dapo.weight_sync.stage import comparing_role
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError


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
        agreement = Agreement.of_all_ranks(config.timeout_s, WeightSyncError)
        super().__init__(agreement, servers, calls, stage, plan, layout, config, phase)
        agreement.each("import of SGLang", prepare_handles)
        known = agreement.gather((layout.pp_rank, plan) if layout.is_source else None)
        sources = {each[0]: rank for rank, each in enumerate(known) if each is not None}
        ranks = [sources[number] for number in range(layout.pp)]
        [place] = [place for place in places if layout.rank in place.ranks]
        group = make_place_group(places, config.timeout_s)
        plans = [known[rank][1] for rank in ranks]
        self._sender = HandleSender(source, plans, ranks, place, group, calls, layout, device)
        self._make_room = make_room

    def _deliver(self, push: Push) -> Delivery:
        steps = push.agreement
        members = steps.leader("wake", self._servers.pause, (), push.deadline)
        push.watch.lap("wake")
        if not members:
            return Delivery({}, False, [])
        sent = steps.all("send", self._sender.send, members, push.version, push.deadline)
        push.watch.lap("send")
        lost = {url: why for each in sent for url, why in each.lost.items()}
        steps.leader("leave out", self._servers.leave_out, "send", lost)
        versions = {url: member.version for url, member in members.items() if url not in lost}
        # all ranks send at the same time; only source ranks count their stage's tensors
        first, *others = (each.totals for each in sent)
        return Delivery(versions, bool(lost), [first, *(replace(each, seconds={}) for each in others)])

    def _after_transfer(self, push: Push) -> None:
        push.agreement.each("park", self._free_weights)
        push.watch.lap("park")

    def _free_weights(self) -> None:
        collect_handles()  # those that the servers let go at the end of the session
        self._make_room()
