"""Planning and writing one rank's files of a checkpoint, in this process or in a forked one.

Megatron's own writer reports through a queue whose server process imports the whole program again (seconds per rank),
and a rank that fails leaves the others waiting. Here every outcome travels over the job's own process group.
"""

import atexit
import gc
import math
import multiprocessing
import os
import signal
from collections import defaultdict
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dapo.common.parent_death import end_with_parent
from megatron_dapo.common.signals import ignore_signals
from megatron_dapo.platform.agreement import describe
from megatron_dapo.platform.parallel import ParallelLayout

FILE_BYTES = 2**28  # about; a tensor is never cut


@dataclass(frozen=True, eq=False)
class PlannedWrite:
    """plans: one per file of this rank. metadata: on rank 0, of the whole checkpoint."""

    writer: FileSystemWriter
    planner: MCoreSavePlanner
    plans: list[SavePlan]
    metadata: Metadata | None

    def write(self) -> list[WriteResult]:
        """This rank's files, fsynced."""
        return [result for plan in self.plans for result in self.writer.write_data(plan, self.planner).wait()]


class Planning(AsyncSaveShardedStrategy):
    """Megatron's extension point for how tensors are saved. This one plans, and leaves the writing to others."""

    def __init__(self, layout: ParallelLayout, copy_to_host: bool) -> None:
        super().__init__("torch_dist", 1)
        self._layout, self._copy_to_host = layout, copy_to_host
        self.planned: PlannedWrite | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def async_save(self, sharded_state_dict: dict, checkpoint_dir: str | Path) -> AsyncRequest:
        mine: dict[str, list[ShardedBase]] = defaultdict(list)
        for part in nested_values(sharded_state_dict):
            if is_main_replica(part.replica_id):
                if self._copy_to_host and isinstance(part, ShardedTensor):
                    part.data = part.data.cpu()  # from a GPU a copy; a forked process keeps the host's as they are
                mine[part.key if isinstance(part, ShardedTensor) else part.unique_key].append(part)
        # no copying ahead on another stream: a forked process must not touch the GPU
        writer = FileSystemWriter(checkpoint_dir, per_thread_copy_ahead=0)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        layout = self._layout
        planner.set_up_planner(mcore_to_pyt_state_dict(mine), is_coordinator=layout.rank == 0)
        writer.set_up_storage_writer(is_coordinator=layout.rank == 0)
        plan = planner.create_local_plan()
        plans = [None] * layout.world_size if layout.rank == 0 else None
        dist.gather_object(plan, plans, dst=0, group=layout.cpu_group)
        metadata = planner.create_global_plan(plans)[1] if plans else None
        self.planned = PlannedWrite(writer, planner, self._files(writer, planner.finish_plan(plan)), metadata)
        return AsyncRequest(None, (), [])

    def _files(self, writer: FileSystemWriter, plan: SavePlan) -> list[SavePlan]:
        """The plan in parts of a bounded size: torch's writer keeps copies of a file's tensors until the file ends. A
        file is named after its number, which is the rank plus a multiple of the number of ranks."""
        parts: list[list[WriteItem]] = [[]]
        size = 0
        for item in plan.items:
            if size > FILE_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(item)
            size += _num_bytes(item)
        numbered = writer.prepare_global_plan([plan] * (len(parts) * self._layout.world_size))
        mine = numbered[self._layout.rank :: self._layout.world_size]
        return [replace(plan, items=items) for plan, items in zip(mine, parts, strict=True)]


def _num_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


class ForkedWrite:
    """Writes in a child process, which has this process's memory as it is now: training may change it at once.

    The child ends with this process, which does not wait for it: what it has written by then counts for nothing.
    """

    def __init__(self, planned: PlannedWrite) -> None:
        """Raises nothing: that there is no memory for a child, say, is told by `result`, like any write that failed."""
        context = multiprocessing.get_context("fork")
        self._error = ""
        try:
            self._receiver, sender = context.Pipe(duplex=False)
            self._process = context.Process(target=_write_and_report, args=(planned, sender, os.getpid()), daemon=True)
            self._process.start()
        except OSError as error:
            self._error = f"no process can be started to write ({describe(error)})"
            return
        sender.close()  # then the child's end is the only one, and its death ends the pipe
        atexit.register(self._process.kill)  # before multiprocessing's own, which would wait for storage that hangs

    def is_done(self) -> bool:
        return bool(self._error) or self._receiver.poll()  # also true at the end of the pipe

    def result(self) -> list[WriteResult]:
        """Waits. Raises OSError with the child's error, or saying how it ended."""
        if self._error:
            raise OSError(self._error)
        try:
            results, error = self._receiver.recv()
        except EOFError:
            self._join()
            raise OSError(f"the writing process ended with exit code {self._process.exitcode}") from None
        self._join()
        if error:
            raise OSError(error)
        return results

    def _join(self) -> None:
        self._process.join()
        atexit.unregister(self._process.kill)


def _write_and_report(planned: PlannedWrite, sender: Connection, parent: int) -> None:
    gc.disable()  # collecting the parent's GPU objects here would touch the GPU
    torch.set_num_threads(1)  # a fork has the parent's OpenMP team without its threads: two would wait for ever
    # sent to all processes of a job: the trainer decides
    ignore_signals((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    end_with_parent(parent)  # a killed trainer leaves no writer behind, in a folder that its successor uses
    try:
        answer = planned.write(), ""
    except Exception as error:  # noqa: BLE001  every failure is the parent's to report
        answer = [], describe(error)
    sender.send(answer)
    sender.close()
