"""Saving: every rank its own files, written at once or in the background, complete only when every
rank's is."""

import io
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dapo.checkpointing.pending_save import PendingSave
from megatron_dapo.checkpointing.torch_dist.generators import derived_seed, generator_states
from megatron_dapo.checkpointing.torch_dist.optimizer_state import slots
from megatron_dapo.checkpointing.torch_dist.planners import SliceSavePlanner
from megatron_dapo.checkpointing.torch_dist.reading import COMMON_FILE
from megatron_dapo.checkpointing.torch_dist.slices import CONTENT, TensorSlice, model_regions, replica_of
from megatron_dapo.checkpointing.torch_dist.writer import RankFilesWriter
from megatron_dapo.common.errors import UserError
from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.weight_map import ADAPTERS
from megatron_dapo.platform.agreement import describe
from megatron_dapo.platform.parallel import ParallelLayout

FORMAT = 1
OPTIMIZER_PREFIX = "optimizer.state."
_PROBE_BYTES = 2**20


def save(
    folder: Path,
    model: ModelParts,
    layout: ParallelLayout,
    *,
    optimizer: MegatronOptimizer | None = None,
    lr_schedule: OptimizerParamScheduler | None = None,
    background: bool = False,
) -> PendingSave:
    """Save the trained weights (of a model with adapters only these) into `folder`. Collective over
    all ranks.

    The folder must be empty or absent, and on storage that all ranks share. With an optimizer, the
    states of all generators are saved too.

    Args:
        background: return as soon as the state is safe from changes; a forked process writes the
            files. Else the save is finished on return.

    Raises:
        UserError: on every rank, if the folder cannot be used.
        JobError: on every rank, if writing failed.
    """
    folder = Path(folder)
    _prepare(folder, layout)
    slices = list(model_slices(model, layout, adapters=model.lora is not None))
    objects: dict[str, io.BytesIO] = {}
    common = {
        "format": FORMAT,
        "written_with": written_with(layout),
        "params_dtype": str(model.config.params_dtype).removeprefix("torch."),
    }
    if optimizer is not None:
        slices += optimizer_slices(optimizer, model, layout)
        common |= _training_state(optimizer, lr_schedule, layout)
        objects[generators_name(layout)] = _pickled([generator_states()])
    written = [each for each in slices if each.is_written]
    if background:  # from a GPU a copy; a forked process keeps the host's as they are
        written = layout.agreement.each(f"copying tensors for {folder}", _on_host, written)
    pending = _begin(folder, SliceSavePlanner(written, objects), common, layout, background)
    if not background:
        pending.finish()
    return pending


def _on_host(slices: list[TensorSlice]) -> list[TensorSlice]:
    return [replace(each, values=each.values.cpu()) for each in slices]


def _begin(
    folder: Path, planner: SliceSavePlanner, common: dict[str, Any], layout: ParallelLayout, background: bool
) -> PendingSave:
    """Plan on all ranks, write their common state, and begin to write the rest. Collective."""
    plan = planner.finish_plan(planner.create_local_plan())
    plans: list[SavePlan] | None = [plan] * layout.world_size if layout.rank == 0 else None
    dist.gather_object(plan, plans, dst=0, group=layout.cpu_group)
    index: list[Metadata] = []

    def begin() -> None:
        assert plans is not None, "rank 0 has all plans"
        index.append(planner.create_global_plan(plans)[1])
        torch.save({"common": common, "content_metadata": CONTENT}, folder / COMMON_FILE)

    layout.agreement.leader(f"beginning {folder}", begin)
    writer = RankFilesWriter(folder, layout.rank, layout.world_size)
    return PendingSave(
        layout.agreement,
        folder,
        write=lambda: writer.write_data(plan, planner).wait(),
        complete=partial(_complete, folder, writer, index, layout),
        background=background,
    )


def _complete(
    folder: Path, writer: RankFilesWriter, index: list[Metadata], layout: ParallelLayout, results: list[WriteResult]
) -> None:
    """Write the index of all ranks' files. Collective. index: the one of the whole checkpoint, on
    rank 0."""
    all_results: list[list[WriteResult]] | None = [results] * layout.world_size if layout.rank == 0 else None
    dist.gather_object(results, all_results, dst=0, group=layout.cpu_group)

    def finish() -> None:
        assert all_results is not None, "rank 0 has all results"
        writer.finish(index[0], all_results)

    layout.agreement.leader(f"completing {folder}", finish)


def written_with(layout: ParallelLayout) -> dict[str, int]:
    """Return the layout as stored; vpp is 0 without virtual stages; cp and etp only if used."""
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "vpp": layout.vpp or 0,
        "dp": layout.dp,
        "ep": layout.ep,
        **({"cp": layout.cp} if layout.cp > 1 else {}),
        **({"etp": layout.etp} if layout.etp > 1 else {}),
        "world_size": layout.world_size,
    }


def generators_name(layout: ParallelLayout) -> str:
    """Return the name of this rank's generator states, in the way of Megatron's sharded objects."""
    return f"rng_state/shard_{layout.rank}_{layout.world_size}"


def model_slices(model: ModelParts, layout: ParallelLayout, *, adapters: bool = False) -> Iterator[TensorSlice]:
    """Yield the slices of the weights; adapters: of the adapters instead."""
    for number, (parameter, regions) in enumerate(model_regions(model, layout).items()):
        replica = replica_of(parameter, number, layout)
        for region in regions:
            if region.name.startswith(ADAPTERS) != adapters:
                continue
            yield from region.slices(parameter.detach().view(-1), 0, replica)


def optimizer_slices(optimizer: MegatronOptimizer, model: ModelParts, layout: ParallelLayout) -> Iterator[TensorSlice]:
    """Yield the slices of the moments, and of the fp32 weights if the model's are in half
    precision."""
    regions = model_regions(model, layout)
    for number, slot in enumerate(slots(optimizer)):
        replica = 0 if slot.sharded else replica_of(slot.parameter, number, layout)
        for name, values in slot.tensors().items():
            for region in regions[slot.parameter]:
                yield from region.slices(values, slot.first, replica, f"{OPTIMIZER_PREFIX}{name}.")


def _pickled(content: object) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream


def _training_state(
    optimizer: MegatronOptimizer, lr_schedule: OptimizerParamScheduler | None, layout: ParallelLayout
) -> dict[str, Any]:
    """Return the state common to all ranks."""
    local_counts = {slot.num_steps for slot in slots(optimizer)}
    gathered = layout.gather((local_counts, derived_seed(generator_states())))
    counts = {count for rank_counts, _ in gathered for count in rank_counts}
    assert len(counts) == 1, f"the optimizer counts {counts} steps"
    state = {"optimizer_steps": counts.pop(), "rng_seed": gathered[0][1]}
    if lr_schedule is not None:
        state["lr_schedule"] = lr_schedule.state_dict()
    return state


def _prepare(folder: Path, layout: ParallelLayout) -> None:
    """Make the folder and try to write there, on rank 0; the others must see it. Raises UserError
    on all ranks."""
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
    """Raise OSError if there is no room for the small files that rank 0 writes first."""
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
