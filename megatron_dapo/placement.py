"""Where trainer and servers are: on GPUs of their own, or in turns on the same ones."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Protocol

from megatron_dapo.checks.model_checks import read_model_specs
from megatron_dapo.config.derived import shares_gpus, uses_servers
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.memory import trainer_memory
from megatron_dapo.models.weight_source import WeightSource
from megatron_dapo.platform.agreement import Agreement, Deadline
from megatron_dapo.platform.device import allocator_bytes, device, free_bytes, is_gpu, used_bytes
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.servers.client import SGLangClient
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.servers.server_watch import report_unresponsive
from megatron_dapo.storage.lease import LeaseFolder
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import given_server_key
from megatron_dapo.training.parked import Parked, Role
from megatron_dapo.weight_sync.buckets import Source
from megatron_dapo.weight_sync.fp8_source import Fp8Source, relative_error
from megatron_dapo.weight_sync.handle_push import HandlePush
from megatron_dapo.weight_sync.handles import places
from megatron_dapo.weight_sync.push import NothingPushed, SyncReport, reserve_s
from megatron_dapo.weight_sync.servers import ServerCalls
from megatron_dapo.weight_sync.shared_leader import KILL_S, SharedLeader
from megatron_dapo.weight_sync.sync import WeightSync
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

Phase = Callable[[str], AbstractContextManager[None]]

FREE_S = 20.0
"""Seconds in which sleeping servers' memory must be seen free: the driver unmaps it after their
answer."""

_POLL_S = 0.05


class Placement(Protocol):
    """Who has the GPUs. Every method is collective over all ranks."""

    saves_first: bool
    """Whether a checkpoint is due before the push: afterwards the trainer has no memory."""

    def hold(self, source: WeightSource, roles: Sequence[Role | None]) -> None:
        """Take the built models: the weights to push, and those that leave the GPU with them."""
        ...

    def to_trainer(self) -> None:
        """Give the trainer its memory; it may have it already."""
        ...

    def push(self, version: int) -> SyncReport | NothingPushed:
        """Send the weights to the servers; they may sample then."""
        ...

    def close(self) -> None: ...


class OwnGpus:
    """Trainer and servers have GPUs of their own, or there are no servers."""

    saves_first = False

    def __init__(self, config: Config, layout: ParallelLayout, run: RunFolder, phase: Phase) -> None:
        self._config = config
        self._layout = layout
        self._run = run
        self._phase = phase
        self._weights: WeightSync | None = None
        self._fp8_error: Callable[[], float | None] = lambda: None  # of the last push

    def hold(self, source: WeightSource, roles: Sequence[Role | None]) -> None:
        if uses_servers(self._config):
            self._weights = WeightSync(
                self._as_served(source),
                ServerList.of_config(self._config.actor_rollout_ref.rollout).read_or_keep,
                _connect(self._config),
                self._layout,
                self._config.weight_sync,
                device(),
                report_unresponsive=partial(report_unresponsive, self._run),
                phase=self._phase,
            )

    def to_trainer(self) -> None:
        pass

    def push(self, version: int) -> SyncReport | NothingPushed:
        if self._weights is None:
            return NothingPushed()
        return replace(self._weights.push(version), fp8_error=self._fp8_error())

    def _as_served(self, source: WeightSource) -> Source:
        """Return the weights in the servers' form."""
        if self._config.actor_rollout_ref.rollout.quantization is None:
            return source
        blocks = Fp8Source(source)
        agreement = Agreement.of_all_ranks(self._config.weight_sync.timeout_s, WeightSyncError)
        self._fp8_error = lambda: relative_error(agreement.all("error of FP8 blocks", blocks.sums))
        return blocks

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()


class SharedGpus:
    """Trainer and servers use the same GPUs in turns.

    Local rank r is on the GPU of server r // TP, of its rank r % TP.
    """

    saves_first = True

    def __init__(self, config: Config, layout: ParallelLayout, run: RunFolder, phase: Phase) -> None:
        """Take nothing yet: the servers have the GPUs. Collective over all ranks."""
        self._layout = layout
        self._phase = phase
        self._config = config.weight_sync
        megatron = config.actor_rollout_ref.actor.megatron
        self._park = partial(Parked, params=megatron.param_offload, optimizer=megatron.optimizer_offload)
        self._calls = ServerCalls(_connect(config))
        urls = ServerList.of_config(config.actor_rollout_ref.rollout).read()
        self._places = places(urls, layout.world_size)
        self._leader = SharedLeader(
            lambda: urls,
            self._calls,
            self._config.timeout_s,
            reserve_s(self._config),
            partial(report_unresponsive, run),
            LeaseFolder(run.lease),
        )
        self._agreement = Agreement.of_all_ranks(self._config.timeout_s + KILL_S, WeightSyncError)
        self._parked: Parked = self._park(())
        self._least_bytes = _keeper_bytes(config)
        self._weights: HandlePush | None = None
        self._has_gpus = False
        self._sleep_s = 0.0  # since the last push
        self._moved_bytes = 0  # likewise, to the host and back, of this rank
        self._held: dict[str, int] = {}  # of this rank's GPU: name -> bytes

    def hold(self, source: WeightSource, roles: Sequence[Role | None]) -> None:
        self._parked = self._park(roles)
        self._weights = HandlePush(
            source,
            self._leader,
            self._calls,
            self._places,
            self._layout,
            self._config,
            device(),
            self._park_weights,
            self._phase,
        )

    def to_trainer(self) -> None:
        """Put the servers to sleep, see their memory free, and bring the trainer's back.

        Raises WeightSyncError on all ranks if a server neither sleeps nor ends, or if somebody else
        holds the memory.
        """
        if self._has_gpus:
            return
        with self._phase("weight_sync"):
            began = time.perf_counter()
            self._agreement.leader("sleep", self._leader.sleep, Deadline(self._config.timeout_s))
            self._require_memory()
            self._note("asleep_used", used_bytes())
            self._agreement.leader("sleep", self._leader.give_to_trainer)
            self._agreement.each("restore", self._parked.restore)
            self._moved_bytes += self._parked.num_bytes
            self._has_gpus = True
            self._sleep_s += time.perf_counter() - began

    def push(self, version: int) -> SyncReport:
        """Send the weights by handles, park them, and wake the servers."""
        assert self._weights is not None, "hold() comes before the first push"
        self.to_trainer()  # in the middle of sampling, for servers that came back
        self._has_gpus = False
        with self._phase("weight_sync"):
            began = time.perf_counter()
            self._agreement.each("park", self._parked.park_states)
            self._moved_bytes += self._parked.num_bytes
            parking_s = time.perf_counter() - began
        report = self._weights.push(version)
        seconds = report.seconds | {"sleep": self._sleep_s, "park": report.seconds.get("park", 0.0) + parking_s}
        moved, self._moved_bytes, self._sleep_s = self._moved_bytes, 0, 0.0
        return replace(report, seconds=seconds, moved_bytes=moved, held_bytes=dict(self._held))

    def close(self) -> None:
        self._calls.close()

    def _park_weights(self) -> None:
        self._parked.park_weights()
        self._moved_bytes += self._parked.num_bytes
        self._note("parked_kept", allocator_bytes())

    def _note(self, name: str, num_bytes: int | None) -> None:
        if num_bytes is not None:
            self._held[name] = num_bytes

    def _require_memory(self) -> None:
        """Wait until every GPU has the memory that its rank needs; kill servers that keep it."""
        lacks = self._agreement.all("free memory", self._lack)
        if not any(lacks):
            return
        keeping = {
            place.url: f"keeps memory of a GPU after it fell asleep ({lack})"
            for place in self._places
            for lack in filter(None, (lacks[rank] for rank in place.ranks))
        }
        self._agreement.leader("sleep", self._leader.kill, keeping)
        lacks = self._agreement.all("free memory", self._lack)
        if any(lacks):
            named = "; ".join(f"rank {rank}: {lack}" for rank, lack in enumerate(lacks) if lack)
            raise WeightSyncError(
                f"GPUs lack memory although all servers sleep ({named}); end other processes on them (nvidia-smi shows "
                f"them) or, if there are none, raise trainer.gpu_reserve_gb."
            )

    def _lack(self) -> str | None:
        """Return the shortage of this rank's GPU in words; None if enough is free in time."""
        needed = max(self._parked.needed_bytes(), self._least_bytes)
        deadline = Deadline(FREE_S)
        while (free := free_bytes()) is not None and free < needed:
            if not deadline.left():
                return f"{free / 1e9:.1f} GB are free, the trainer needs {needed / 1e9:.1f}"
            time.sleep(_POLL_S)
        return None


def start_placement(config: Config, layout: ParallelLayout, run: RunFolder, phase: Phase) -> Placement:
    """Return the config's placement. Collective over all ranks."""
    return (SharedGpus if shares_gpus(config) else OwnGpus)(config, layout, run, phase)


def _keeper_bytes(config: Config) -> int:
    """Return the least bytes that a GPU must have free with its server asleep: half of the plan's
    need for training.

    What `restore` takes may fit beside a server that keeps its cache, and the activations do not.
    Half, since the plan may be off and such a server keeps most of a GPU. 0 on a CPU.
    """
    specs = read_model_specs(config) if is_gpu() else None
    return trainer_memory(config, *specs).total // 2 if specs else 0


def _connect(config: Config) -> Callable[[str], SGLangClient]:
    api_key = given_server_key(config)
    return lambda url: SGLangClient(url, api_key)
