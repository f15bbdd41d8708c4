"""Pushes the trainer's weights by broadcasts, in groups of the trainer and the servers."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_dapo.config.schema.run import WeightSyncConfig
from megatron_dapo.platform.agreement import Deadline
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.weight_sync.buckets import Source, plan_for
from megatron_dapo.weight_sync.fp8_source import Fp8Source
from megatron_dapo.weight_sync.leader import ServerLeader
from megatron_dapo.weight_sync.push import Delivery, Push, WeightPush, reserve_s
from megatron_dapo.weight_sync.sender import Sender
from megatron_dapo.weight_sync.servers import PROBE_S, ServerCalls, ServerControl, ServerMember
from megatron_dapo.weight_sync.stage import StageTotals, stage_role
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

PROBE_SHARE = 0.25
"""Of the reserve (see `push.RESERVE_S`): for finding the dead servers."""


class WeightSync(WeightPush):
    """Pushes to servers on GPUs of their own.

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
        ranks. Raises as WeightPush does."""
        reserve = reserve_s(config)
        calls = ServerCalls(connect)
        in_blocks = isinstance(source, Fp8Source)
        servers = ServerLeader(
            urls, calls, config.timeout_s, reserve, report_unresponsive, config.pause_mode, in_blocks
        )
        plan = plan_for(device, source.specs(), config.bucket_size_mb)
        probe_s = min(PROBE_S, PROBE_SHARE * reserve)
        flushes = config.pause_mode == "retract"
        stage = stage_role(
            source,
            plan,
            layout,
            config,
            lambda: Sender(layout.pp_rank, calls, plan, device, probe_s, flushes=flushes),
            device,
        )
        # the members of the groups, the same on all ranks
        self._group: dict[str, int] | None = None
        super().__init__(servers, calls, stage, plan, layout, config, phase)

    def _deliver(self, push: Push) -> Delivery:
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
                return Delivery(versions, rejoined or bool(lost), [total for total in totals if total is not None])
            except WeightSyncError as failure:
                self._drop_groups()
                urls = list(members)
                why = str(failure)
            gone, may_repeat = steps.leader("recover", self._servers.recover, urls, why, push.deadline)
            push.watch.lap("recover")
            lost += gone
        self._drop_groups()
        return Delivery({}, False, [])

    def _join(self, push: Push, members: dict[str, ServerMember], deadline: Deadline) -> bool:
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

    def _forget(self, confirmed: Collection[str]) -> None:
        self._stage.forget(confirmed)

    def _drop_groups(self) -> None:
        """Give the groups up at once: servers that wait in a collective are freed."""
        self._group = None
        self._stage.drop_group()

    def _give_up(self) -> None:
        self._drop_groups()
        super()._give_up()


def _time_for_attempt(push: Push, members: dict[str, ServerMember]) -> Deadline:
    """Return an attempt's deadline: half of the time left if there are other servers for a second
    attempt, in case one freezes."""
    left = push.deadline.left()
    return Deadline(left / 2 if len(members) > 1 else left)
