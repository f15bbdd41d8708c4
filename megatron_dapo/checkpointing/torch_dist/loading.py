"""Loads strictly: the checkpoint has every tensor of this run, of the same shape, and no others."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_dapo.checkpointing.torch_dist.generators import reseed, restore_generators
from megatron_dapo.checkpointing.torch_dist.optimizer_state import slots
from megatron_dapo.checkpointing.torch_dist.planners import SliceLoadPlanner
from megatron_dapo.checkpointing.torch_dist.reading import (
    only_plain,
    read_common,
    read_index,
    require_file,
)
from megatron_dapo.checkpointing.torch_dist.saving import (
    FORMAT,
    OPTIMIZER_PREFIX,
    generators_name,
    model_slices,
    optimizer_slices,
    written_with,
)
from megatron_dapo.checkpointing.torch_dist.slices import TensorSlice
from megatron_dapo.checkpointing.torch_dist.writer import MARK, TORCH_DIST
from megatron_dapo.common.errors import UserError
from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.value_head import VALUE_HEAD_PREFIX
from megatron_dapo.models.weight_map import ADAPTERS
from megatron_dapo.platform.agreement import describe
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.storage.model_folder import ADAPTER

_MAX_NAMED = 4  # tensors that an error names


@dataclass(frozen=True)
class LoadReport:
    """The result of a load."""

    restored: tuple[str, ...]
    """Of model, optimizer, lr_schedule, rng."""
    not_restored: tuple[str, ...]
    """Sentences."""
    written_with: dict[str, int]
    """Sizes of the layout that wrote the checkpoint; see `saving.written_with`."""


def load(
    folder: Path,
    model: ModelParts,
    layout: ParallelLayout,
    *,
    optimizer: MegatronOptimizer | None = None,
    lr_schedule: OptimizerParamScheduler | None = None,
    adapters: bool = False,
) -> LoadReport:
    """Fill the model, and the optional objects, in place. Collective over all ranks; any layout may
    have written it.

    Without an optimizer only the weights are read; make the optimizer afterwards, since it copies
    them. A critic then takes the body of a policy.

    Args:
        adapters: read the model's adapters, and not its frozen weights.

    Raises:
        UserError: on every rank, naming missing and unexpected tensors and other shapes; then
            discard the model.
    """
    folder = Path(folder)
    index, common = _read_index(folder, layout)
    shapes = _stored_shapes(index)
    if optimizer is None:
        slices = list(_weights(model, layout, shapes, adapters))
        _refuse_adapters(folder, shapes, adapters)
        _check_tensors(folder, shapes, slices, layout)
        if not adapters:
            _zero_padding(model, None)
        _read(folder, index, SliceLoadPlanner(slices, ()), layout)
        return LoadReport(("model",), _dtype_note(common, model), common["written_with"])
    slices = [*model_slices(model, layout, adapters=adapters), *optimizer_slices(optimizer, model, layout)]
    _check_training_state(folder, common, model)
    _check_tensors(folder, shapes, slices, layout)
    is_same_layout = common["written_with"] == written_with(layout)
    planner = SliceLoadPlanner(slices, [generators_name(layout)] if is_same_layout else [])
    if not adapters:
        _zero_padding(model, optimizer)
    _read(folder, index, planner, layout)
    for slot in slots(optimizer):
        slot.set_num_steps(common["optimizer_steps"])
    restored = ["model", "optimizer"]
    notes: list[str] = []
    if lr_schedule is not None:
        notes += restore_schedule(lr_schedule, common["lr_schedule"])
        restored.append("lr_schedule")
    if is_same_layout:
        layout.agreement.each(
            f"reading {folder}", _restore_generators, folder, planner.objects[generators_name(layout)]
        )
        restored.append("rng")
    else:
        reseed(common["rng_seed"], layout.rank)
        notes.append(
            f"rng: written by {_describe(common['written_with'])}, this run is {_describe(written_with(layout))}: "
            "generators start anew from a seed derived from the saved ones."
        )
    return LoadReport(tuple(restored), tuple(notes), common["written_with"])


def _read_index(folder: Path, layout: ParallelLayout) -> tuple[Metadata, dict[str, Any]]:
    """Return the index of all tensors, and the state common to all ranks."""

    def read() -> tuple[Metadata, dict[str, Any]]:
        try:
            return _contents(folder)
        except UserError:
            raise
        except Exception as failure:
            raise UserError(
                f"{folder} is not a complete checkpoint of this program: {describe(failure)}; choose another."
            ) from failure

    return layout.agreement.each(f"reading {folder}", read)


def _contents(folder: Path) -> tuple[Metadata, dict[str, Any]]:
    """Read the index and the common state. Raises anything for a damaged file, ValueError for
    another format."""
    index = read_index(folder)
    mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
    if mark["sharded_backend"] != TORCH_DIST["sharded_backend"]:
        raise ValueError(f"it is stored as {mark['sharded_backend']}, this program reads torch_dist")
    common = read_common(folder)
    if common["format"] != FORMAT:
        raise ValueError(f"it has format {common['format']}, this program reads {FORMAT}")
    return index, common


def _stored_shapes(index: Metadata) -> dict[str, tuple[int, ...]]:
    stored = index.state_dict_metadata.items()
    return {name: tuple(tensor.size) for name, tensor in stored if isinstance(tensor, TensorStorageMetadata)}


def _weights(
    model: ModelParts, layout: ParallelLayout, shapes: dict[str, tuple[int, ...]], adapters: bool
) -> Iterator[TensorSlice]:
    """Yield the slices of the weights only.

    `shapes` loses the unwanted tensors: moments, and a policy's head if a critic takes its body;
    the critic's own head then keeps its values.
    """
    for name in [name for name in shapes if name.startswith(OPTIMIZER_PREFIX)]:
        del shapes[name]
    if model.spec.value_head:
        shapes.pop("output_layer.weight", None)
    for each in model_slices(model, layout, adapters=adapters):
        is_new = model.spec.value_head and each.name.startswith(VALUE_HEAD_PREFIX) and each.name not in shapes
        if not is_new:
            yield each


def _refuse_adapters(folder: Path, shapes: dict[str, tuple[int, ...]], adapters: bool) -> None:
    if not adapters and any(name.startswith(ADAPTERS) for name in shapes):
        raise UserError(
            f"{folder} holds adapters (LoRA) without their base weights; give the run's model/, with the merged "
            f"weights, or the base model, with actor_rollout_ref.model.lora_adapter_path "
            f"{folder.parent / ADAPTER}."
        )


def _check_training_state(folder: Path, common: dict[str, Any], model: ModelParts) -> None:
    if "optimizer_steps" not in common:
        raise UserError(f"{folder} has a model and no optimizer; start a run from it instead of resuming.")
    dtype = _dtype(model)
    if common["params_dtype"] != dtype:
        raise UserError(
            f"{folder} was written by a run in {common['params_dtype']}, this one is in {dtype}; "
            f"set actor_rollout_ref.actor.megatron.dtype to {common['params_dtype']}."
        )


def _check_tensors(
    folder: Path, stored: dict[str, tuple[int, ...]], slices: Iterable[TensorSlice], layout: ParallelLayout
) -> None:
    """Compare names and shapes with the needs of all ranks. Collective; raises UserError on all."""
    wanted: dict[str, tuple[int, ...]] = {}
    for shapes in layout.gather({each.name: each.whole_shape for each in slices}):
        wanted |= shapes
    shapes_differ = [
        f"{name} ({stored[name]} there, {wanted[name]} here)"
        for name in sorted(wanted.keys() & stored.keys())
        if stored[name] != wanted[name]
    ]
    problems = [
        *_sentence("lacks", sorted(wanted.keys() - stored.keys())),
        *_sentence("has, which this model has not,", sorted(stored.keys() - wanted.keys())),
        *_sentence("has in another shape", shapes_differ),
    ]
    if problems:
        raise UserError(f"{folder} {'; it '.join(problems)}: was it written by a run of this model?")


def _sentence(verb: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return [f"{verb} {', '.join(names[:_MAX_NAMED])}{more}"]


def _read(folder: Path, index: Metadata, planner: SliceLoadPlanner, layout: ParallelLayout) -> None:
    """Fill the planner's slices. Collective; raises UserError on all ranks."""
    problem = None
    try:
        reader = FileSystemReader(folder)
        reader.set_up_storage_reader(index, is_coordinator=layout.rank == 0)
        planner.set_up_planner({}, index)
        plan = planner.create_local_plan()
        for name in {index.storage_data[item.storage_index].relative_path for item in plan.items}:
            require_file(folder / name)
        with only_plain():
            reader.read_data(plan, planner).wait()
    except Exception as failure:  # reading a damaged file raises anything
        problem = describe(failure)
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(layout.gather(problem)) if text is not None]
    if problems:
        raise UserError(f"{folder} cannot be read ({'; '.join(problems)}); choose another checkpoint.")


def _restore_generators(folder: Path, stored: list[dict[str, Any]]) -> None:
    try:
        restore_generators(stored[0])
    except Exception as failure:  # values of another kind raise anything
        raise UserError(
            f"{folder} holds no states of generators ({describe(failure)}); choose another checkpoint."
        ) from failure


def _zero_padding(model: ModelParts, optimizer: MegatronOptimizer | None) -> None:
    """Set the rows beyond the vocabulary, absent from checkpoints, to zero, as for Hugging Face
    weights."""
    padded = {
        parameter
        for chunk in model.chunks
        for name, parameter in chunk.named_parameters()
        if name in ("embedding.word_embeddings.weight", "output_layer.weight")
    }
    with torch.no_grad():
        for parameter in padded:
            parameter.zero_()
        for slot in slots(optimizer) if optimizer is not None else ():
            if slot.parameter in padded:
                for tensor in slot.tensors().values():
                    tensor.zero_()


def restore_schedule(lr_schedule: OptimizerParamScheduler, saved: dict) -> list[str]:
    """Continue at the saved step; everything else of the schedule follows this run's configuration.

    Returns a sentence that names the differences that matter.
    """
    lr_schedule.num_steps = 0
    lr_schedule.step(increment=saved["num_steps"])
    here = lr_schedule.state_dict()
    unread = ("lr_decay_steps", "min_lr") if here["lr_decay_style"] == "constant" else ()
    changed = [
        f"{name} was {saved[name]}, is {here[name]}"
        for name in here
        if name not in unread and saved.get(name) != here[name]
    ]
    return [f"lr_schedule: as this run's configuration says: {', '.join(changed)}."] if changed else []


def _dtype(model: ModelParts) -> str:
    return str(model.config.params_dtype).removeprefix("torch.")


def _dtype_note(common: dict, model: ModelParts) -> tuple[str, ...]:
    if common["params_dtype"] == _dtype(model):
        return ()
    return (f"model: stored in {common['params_dtype']}, converted to {_dtype(model)}.",)


def _describe(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name}{size}" for name, size in sizes.items() if name != "world_size" and size)
