"""This rank's place in the parallel layout, and the process groups that go with it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_dapo.common.addresses import node_name
from megatron_dapo.common.seeds import seed_generators
from megatron_dapo.platform import nccl, stores
from megatron_dapo.platform.agreement import Agreement
from megatron_dapo.platform.device import collective_backend, device, is_gpu, prepare_megatron


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes, ranks and process groups of tensor (tp), pipeline (pp), context (cp), data (dp) and
    expert (ep, etp) parallelism."""

    rank: int
    world_size: int
    tp: int
    pp: int
    vpp: int | None
    """Virtual pipeline stages per rank."""
    dp: int
    sp: bool
    """Sequence parallelism."""
    tp_rank: int
    pp_rank: int
    dp_rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    copies_group: dist.ProcessGroup
    """The ranks that hold the same weights, dp x cp."""
    cpu_group: dist.ProcessGroup
    """All ranks over gloo, for Python objects and for collectives that wait for the rollout."""
    agreement: Agreement
    """Of all ranks, over cpu_group."""
    replicas: Sequence[Sequence[int]]
    """By data-parallel rank, the ranks that work on the same samples."""
    cpu_model_group: dist.ProcessGroup
    """This rank's group among `replicas`, over gloo."""
    ep: int = 1
    """Expert parallelism: ep groups of etp ranks side by side have all experts. Each of the stage's
    expert_dp parts, of ep x etp ranks, has the same experts."""
    ep_group: dist.ProcessGroup | None = None
    etp: int = 1
    """Expert tensor parallelism: an expert is cut over etp neighboring ranks of a stage's tp x cp x
    dp."""
    etp_group: dist.ProcessGroup | None = None
    cp: int = 1
    """The ranks that share the tokens of each micro-batch. They hold the same weights, like
    data-parallel ranks."""
    cp_rank: int = 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def sequence_multiple(self) -> int:
        """Return the number that a micro-batch's length must be a multiple of."""
        return self.segment_multiple * (self.tp if self.sp else 1)

    @property
    def segment_multiple(self) -> int:
        """Return the number that divides the length of every packed segment.

        With context parallelism a segment is cut into 2 x cp chunks (models/context_parallel.py).
        """
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def counts_tokens(self) -> bool:
        """Return whether this rank's part enters a sum over all ranks. Of the ranks of a stage with
        the same samples only one does, so that each token counts once."""
        return self.tp_rank == 0 and self.cp_rank == 0

    @property
    def num_copies(self) -> int:
        """Return the number of ranks with the same weights."""
        return self.dp * self.cp

    @property
    def copy_rank(self) -> int:
        """Return this rank's index among the ranks with the same weights."""
        return self.dp_rank * self.cp + self.cp_rank

    @property
    def num_model_chunks(self) -> int:
        return self.vpp or 1

    @property
    def stage_rank(self) -> int:
        """Return this rank's place among the tp x cp x dp ranks of the stage."""
        return self.copy_rank * self.tp + self.tp_rank

    @property
    def etp_rank(self) -> int:
        return self.stage_rank % self.etp

    @property
    def ep_rank(self) -> int:
        return self.stage_rank // self.etp % self.ep

    @property
    def expert_dp(self) -> int:
        """Return the number of ranks with the same experts, or the same part of them."""
        return self.tp * self.num_copies // (self.ep * self.etp)

    @property
    def expert_dp_rank(self) -> int:
        return self.stage_rank // (self.ep * self.etp)

    def place(self, *, of_expert: bool) -> tuple[int, int]:
        """Return this rank's index among the ranks of a cut weight, and their number."""
        return (self.etp_rank, self.etp) if of_expert else (self.tp_rank, self.tp)

    @property
    def is_source(self) -> bool:
        """Return whether this rank has the stage's weights whole, once they are gathered."""
        return self.stage_rank == 0

    @property
    def gathers(self) -> bool:
        """Return whether this rank takes part in gathering the stage's weights: the first ranks
        that together hold all slices and all experts."""
        return self.stage_rank < max(self.tp, self.ep * self.etp)

    @classmethod
    def initialize(
        cls,
        *,
        tp: int = 1,
        pp: int = 1,
        vpp: int | None = None,
        ep: int = 1,
        etp: int = 1,
        cp: int = 1,
        sp: bool = False,
        seed: int = 1,
        timeout_s: float = 600.0,
        object_timeout_s: float | None = None,
    ) -> "ParallelLayout":
        """Join the job's process groups. Collective over all ranks.

        RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from the launcher; without one this is a
        job of one process. Collectives fail after timeout_s, those on Python objects after
        object_timeout_s, since they span the rollout.
        """
        prepare_megatron()
        from megatron.core import parallel_state, tensor_parallel

        timeout = timedelta(seconds=timeout_s)
        if not dist.is_initialized():
            if is_gpu():
                nccl.prepare()
                torch.cuda.set_device(device())
            dist.init_process_group(collective_backend(), timeout=timeout, **stores.rendezvous(timeout))
        object_timeout = timedelta(seconds=object_timeout_s or timeout_s)
        cpu_group = dist.new_group(backend="gloo", timeout=object_timeout)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            create_gloo_process_groups=False,  # only Megatron's older checkpoint formats use them
        )
        agreement = Agreement(cpu_group, object_timeout.total_seconds())
        dp_ranks = agreement.gather(parallel_state.get_data_parallel_rank())
        replicas = [[i for i, dp_rank in enumerate(dp_ranks) if dp_rank == dp] for dp in range(max(dp_ranks) + 1)]
        seed_generators(seed + dist.get_rank())
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            tp=tp,
            pp=pp,
            vpp=vpp,
            dp=parallel_state.get_data_parallel_world_size(),
            sp=sp and tp > 1,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            pp_group=parallel_state.get_pipeline_model_parallel_group(),
            copies_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            cpu_group=cpu_group,
            agreement=agreement,
            replicas=replicas,
            cpu_model_group=_own_group(replicas, object_timeout),
            ep=ep,
            ep_group=parallel_state.get_expert_model_parallel_group(),
            etp=etp,
            etp_group=parallel_state.get_expert_tensor_parallel_group(),
            cp=cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
        )

    def hand_out(self, parts: Sequence[np.ndarray] | None) -> np.ndarray:
        """Return rank 0's part for this data-parallel rank. Collective over all ranks.

        One copy goes to the first rank of each replica, which broadcasts it to the others.

        Args:
            parts: on rank 0, bytes for each data-parallel rank, uint8, of any lengths; None
                elsewhere.
        """
        firsts = [ranks[0] for ranks in self.replicas]
        sizes = torch.tensor([len(part) for part in parts] if parts is not None else [0] * self.dp)
        dist.broadcast(sizes, src=0, group=self.cpu_group)
        sends = []
        if parts is not None:
            own_part = torch.from_numpy(parts[0])
            for part, first in zip(parts[1:], firsts[1:], strict=True):
                sends.append(dist.isend(torch.from_numpy(part), first, group=self.cpu_group))
        else:
            own_part = torch.empty(int(sizes[self.dp_rank]), dtype=torch.uint8)
            if self.rank == firsts[self.dp_rank]:
                dist.recv(own_part, src=0, group=self.cpu_group)
        dist.broadcast(own_part, src=firsts[self.dp_rank], group=self.cpu_model_group)
        for work in filter(None, sends):
            work.wait()
        return own_part.numpy()

    def collect(self, content: np.ndarray, senders: Sequence[int]) -> list[np.ndarray]:
        """Return, on rank 0, the bytes of each sender, in their order; [] elsewhere. Other ranks do
        not wait.

        Args:
            content: bytes of this rank, uint8, of any length.
            senders: ranks, the same on all of them.
        """
        if self.rank == 0:
            return [content if sender == 0 else self._receive(sender) for sender in senders]
        if self.rank in senders:
            dist.send(torch.tensor([len(content)]), 0, group=self.cpu_group)
            dist.send(torch.from_numpy(content), 0, group=self.cpu_group)
        return []

    def _receive(self, sender: int) -> np.ndarray:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, sender, group=self.cpu_group)
        content = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(content, sender, group=self.cpu_group)
        return content.numpy()

    def gather(self, value: Any) -> list:
        """Return every rank's value, in rank order, on all of them. Collective over all ranks."""
        return self.agreement.gather(value)

    def share_of_cores(self) -> int:
        """Return this rank's number of cores; ranks with the same cores share them. Collective over
        all ranks."""
        node_cores = (node_name(), sorted(os.sched_getaffinity(0)))
        return max(1, len(node_cores[1]) // max(1, self.gather(node_cores).count(node_cores)))

    @staticmethod
    def release() -> None:
        """Forget the model-parallel groups; the job stays, and another layout may be
        initialized."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()

    @staticmethod
    def shutdown() -> None:
        """Leave the job, for a clean end of the process."""
        ParallelLayout.release()
        if dist.is_initialized():
            dist.destroy_process_group()


def _own_group(replicas: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup:
    """Return a gloo group of the ranks that work on the same samples as this one. Collective over
    all ranks."""
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in replicas], timeout, backend="gloo")
    return group
