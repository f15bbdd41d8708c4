"""Saving: every rank its own files, written at once or in the background, complete only when every rank's is."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dapo.checkpointing.torch_dist.generators import derived_seed, generator_states
from megatron_dapo.checkpointing.torch_dist.optimizer_state import slots
from megatron_dapo.checkpointing.torch_dist.pieces import CONTENT, model_boxes, replica_of
from megatron_dapo.checkpointing.torch_dist.writer import ForkedWrite, PlannedWrite, Planning
from megatron_dapo.common.errors import JobError, UserError
from megatron_dapo.common.files import flush_to_disk
from megatron_dapo.models.build import ModelParts
from megatron_dapo.platform.agreement import describe
from megatron_dapo.platform.parallel import ParallelLayout

FORMAT = 1
OPTIMIZER_PREFIX = "optimizer.state."
GENERATORS = "rng_state"
_PROBE_BYTES = 2**20


def save(
    folder: Path,
    model: ModelParts,
    layout: ParallelLayout,
    *,
    optimizer: MegatronOptimizer | None = None,
    lr_schedule: OptimizerParamScheduler | None = None,
    background: bool = False,
) -> "PendingSave":
    """Save into `folder`, which must be empty or absent and on storage that all ranks share. Collective over all ranks.

    With an optimizer the states of all generators are saved too. background: returns as soon as the state is safe from
    being changed; files are written by a forked process. Else the save is finished when this returns.
    Raises UserError where the folder cannot be used, JobError where writing failed, both on every rank.
    """
    folder = Path(folder)
    _prepare(folder, layout)
    state = _model_state(model, layout)
    state["common"] = {
        "format": FORMAT,
        "written_with": written_with(layout),
        "params_dtype": str(model.config.params_dtype).removeprefix("torch."),
    }
    if optimizer is not None:
        state |= _optimizer_state(optimizer, model, layout)
        state["common"] |= _training_state(optimizer, lr_schedule, layout)
        state[GENERATORS] = ShardedObject(GENERATORS, generator_states(), (layout.world_size,), (layout.rank,))
    planning = Planning(layout, copy_to_host=background)
    dist_checkpointing.save(state, str(folder), planning, async_sharded_save=True, content_metadata=CONTENT)
    pending = PendingSave(folder, planning.planned, layout, background)
    if not background:
        pending.finish()
    return pending


class PendingSave:
    """A save whose files are being written. Nothing of `folder` counts before `finish` has returned."""

    def __init__(self, folder: Path, planned: PlannedWrite, layout: ParallelLayout, background: bool) -> None:
        self._folder, self._planned, self._layout = folder, planned, layout
        self._forked = ForkedWrite(planned) if background else None
        self._is_finished = False
        self._failure: JobError | None = None

    def is_done(self) -> bool:
        """Whether every rank's writing has ended, well or not, so that `finish` does not wait. Collective over all."""
        return all(self._layout.gather(self._forked is None or self._forked.is_done()))

    def finish(self) -> None:
        """Waits for the files and completes the checkpoint. Collective over all ranks.

        Raises JobError on every rank where one rank's writing failed, and again when called again. Otherwise a
        second call does nothing.
        """
        if self._failure:
            raise self._failure
        if self._is_finished:
            return
        write = self._forked.result if self._forked else self._planned.write
        try:
            results = self._layout.agreement.each(f"writing {self._folder}", write)
            everybodys = [None] * self._layout.world_size if self._layout.rank == 0 else None
            dist.gather_object(results, everybodys, dst=0, group=self._layout.cpu_group)
            self._layout.agreement.leader(f"completing {self._folder}", self._complete, everybodys)
        except JobError as failure:
            self._failure = failure
            raise
        self._is_finished = True
        self._planned = self._forked = None  # what it kept of the state

    def _complete(self, results: list[list[WriteResult]]) -> None:
        """The index of all tensors, then Megatron's mark of a complete checkpoint."""
        self._planned.writer.finish(self._planned.metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))
        for path in (*(p for p in self._folder.iterdir() if p.suffix != ".distcp"), self._folder):
            flush_to_disk(path)


def written_with(layout: ParallelLayout) -> dict[str, int]:
    """The layout, as it is stored; vpp 0: none."""
    sizes = dict(tp=layout.tp, pp=layout.pp, vpp=layout.vpp or 0, dp=layout.dp, ep=layout.ep)
    return {**sizes, "world_size": layout.world_size}


def model_pieces(model: ModelParts, layout: ParallelLayout) -> Iterator:
    """The pieces of the weights."""
    for number, (parameter, boxes) in enumerate(model_boxes(model, layout).items()):
        replica = replica_of(parameter, number, layout)
        for box in boxes:
            yield from box.pieces(parameter.detach().view(-1), 0, replica)


def optimizer_pieces(optimizer: MegatronOptimizer, model: ModelParts, layout: ParallelLayout) -> Iterator:
    """The pieces of the moments, and of the fp32 weights where the model's are in half precision."""
    boxes = model_boxes(model, layout)
    for number, slot in enumerate(slots(optimizer)):
        replica = 0 if slot.sharded else replica_of(slot.parameter, number, layout)
        for name, values in slot.tensors().items():
            for box in boxes[slot.parameter]:
                yield from box.pieces(values, slot.first, replica, f"{OPTIMIZER_PREFIX}{name}.")


def by_number(pieces: Iterator, what: str) -> dict:
    """A flat state dict: the pieces carry their own names."""
    return {f"{what}{number}": piece for number, piece in enumerate(pieces)}


def _model_state(model: ModelParts, layout: ParallelLayout) -> dict:
    return by_number(model_pieces(model, layout), "model")


def _optimizer_state(optimizer: MegatronOptimizer, model: ModelParts, layout: ParallelLayout) -> dict:
    return by_number(optimizer_pieces(optimizer, model, layout), "optimizer")


def _training_state(
    optimizer: MegatronOptimizer, lr_schedule: OptimizerParamScheduler | None, layout: ParallelLayout
) -> dict:
    """What all ranks have in common."""
    steps = {slot.num_steps for slot in slots(optimizer)}
    gathered = layout.gather((steps, derived_seed(generator_states())))
    counts = set().union(*(steps for steps, _ in gathered))
    assert len(counts) == 1, f"the optimizer counts {counts} steps"
    return {
        "optimizer_steps": counts.pop(),
        "rng_seed": gathered[0][1],
        **({"lr_schedule": lr_schedule.state_dict()} if lr_schedule is not None else {}),
    }


def _prepare(folder: Path, layout: ParallelLayout) -> None:
    """Rank 0 makes the folder and tries to write there; the others must see it. Raises UserError on all ranks."""
    what = f"beginning {folder}"
    layout.agreement.leader(what, _make, folder)
    layout.agreement.each(what, _see, folder)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
        if is_empty:
            _probe(folder / ".probe")
    except OSError as failure:
        raise UserError(
            f"the checkpoint cannot be written to {folder}: {describe(failure)}; free space or choose another."
        ) from failure
    if not is_empty:
        raise UserError(f"{folder} is not empty: a checkpoint is never written over another; name a new folder.")


def _probe(path: Path) -> None:
    """Is there room for the small files that rank 0 writes first? Raises OSError."""
    try:
        with path.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def _see(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder} is not seen by {os.uname().nodename}; save to storage that all nodes share.")
