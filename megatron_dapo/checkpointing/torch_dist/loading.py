"""Loading, strictly: every tensor of this run is in the checkpoint, of the same shape, and nothing else is."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_dapo.checkpointing.torch_dist.generators import reseed, restore_generators
from megatron_dapo.checkpointing.torch_dist.optimizer_state import slots
from megatron_dapo.checkpointing.torch_dist.saving import (
    FORMAT,
    GENERATORS,
    OPTIMIZER_PREFIX,
    by_number,
    model_pieces,
    optimizer_pieces,
    written_with,
)
from megatron_dapo.common.errors import UserError
from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.value_head import VALUE_HEAD_PREFIX
from megatron_dapo.platform.agreement import describe
from megatron_dapo.platform.parallel import ParallelLayout

_MAX_NAMED = 4  # tensors that an error names


@dataclass(frozen=True)
class LoadReport:
    """restored: of model, optimizer, lr_schedule, rng. not_restored: sentences. written_with: sizes of the layout that
    the checkpoint was written with (tp, pp, vpp, dp, world_size)."""

    restored: tuple[str, ...]
    not_restored: tuple[str, ...]
    written_with: dict[str, int]


def load(
    folder: Path,
    model: ModelParts,
    layout: ParallelLayout,
    *,
    optimizer: MegatronOptimizer | None = None,
    lr_schedule: OptimizerParamScheduler | None = None,
) -> LoadReport:
    """Fill the model, and what else is given, in place. Collective over all ranks; any layout may have written it.

    Without an optimizer only the weights are read, before one is made: it copies them; a critic then takes the body of
    a policy. Raises UserError on every rank, naming what is missing, unexpected or of another shape; the model is then
    to be thrown away.
    """
    folder = Path(folder)
    stored, common = _read_index(folder, layout)
    pieces = model_pieces(model, layout)
    if model.spec.value_head and optimizer is None:
        stored.pop("output_layer.weight", None)  # the policy's head
        pieces = (piece for piece in pieces if piece.key in stored or not piece.key.startswith(VALUE_HEAD_PREFIX))
    state = by_number(pieces, "model")
    if optimizer is not None:
        _check_training_state(folder, common, model)
        state |= by_number(optimizer_pieces(optimizer, model, layout), "optimizer")
    _check_tensors(folder, stored, state.values(), layout, whole=optimizer is not None)
    same_layout = common["written_with"] == written_with(layout)
    if optimizer is not None and same_layout:
        state[GENERATORS] = ShardedObject(GENERATORS, None, (layout.world_size,), (layout.rank,))
    _zero_padding(model, optimizer)
    answer = _read(folder, state)
    if optimizer is None:
        return LoadReport(("model",), _dtype_note(common, model), common["written_with"])
    for slot in slots(optimizer):
        slot.set_num_steps(common["optimizer_steps"])
    restored, notes = ["model", "optimizer"], []
    if lr_schedule is not None:
        notes += restore_schedule(lr_schedule, common["lr_schedule"])
        restored.append("lr_schedule")
    if same_layout:
        restore_generators(answer[GENERATORS])
        restored.append("rng")
    else:
        reseed(common["rng_seed"], layout.rank)
        notes.append(
            f"rng: written by {_describe(common['written_with'])}, this run is {_describe(written_with(layout))}: "
            "generators start anew from a seed derived from the saved ones."
        )
    return LoadReport(tuple(restored), tuple(notes), common["written_with"])


def _read_index(folder: Path, layout: ParallelLayout) -> tuple[dict, dict]:
    """(name -> how it is stored, what all ranks have in common)."""

    def read() -> tuple[dict, dict]:
        fault = None
        try:
            tensors = FileSystemReader(folder).read_metadata().state_dict_metadata
            common = dist_checkpointing.load_common_state_dict(str(folder))["common"]
            if common["format"] != FORMAT:
                fault = f"it has format {common['format']}, this program reads {FORMAT}"
        except Exception as failure:  # noqa: BLE001  unpickling a damaged file raises anything
            fault = describe(failure)
        if fault:
            raise UserError(f"{folder} is not a complete checkpoint of this program: {fault}; choose another.")
        return tensors, common

    return layout.agreement.each(f"reading {folder}", read)


def _check_training_state(folder: Path, common: dict, model: ModelParts) -> None:
    if "optimizer_steps" not in common:
        raise UserError(f"{folder} has a model and no optimizer; start a run from it instead of resuming.")
    dtype = _dtype(model)
    if common["params_dtype"] != dtype:
        raise UserError(
            f"{folder} was written by a run in {common['params_dtype']}, this one is in {dtype}; "
            f"set actor_rollout_ref.actor.megatron.dtype to {common['params_dtype']}."
        )


def _check_tensors(
    folder: Path, stored: dict, pieces: Iterable[ShardedTensor], layout: ParallelLayout, whole: bool
) -> None:
    """Compares names and shapes with what all ranks together want. whole: the optimizer's tensors are wanted too."""
    wanted = {piece.key: tuple(piece.global_shape) for piece in pieces}
    wanted = {name: shape for part in layout.gather(wanted) for name, shape in part.items()}
    there = {name: tuple(t.size) for name, t in stored.items() if isinstance(t, TensorStorageMetadata)}
    if not whole:
        there = {name: shape for name, shape in there.items() if not name.startswith(OPTIMIZER_PREFIX)}
    shapes = [
        f"{name} ({there[name]} there, {wanted[name]} here)"
        for name in sorted(wanted.keys() & there.keys())
        if there[name] != wanted[name]
    ]
    problems = [
        *_sentence("lacks", sorted(wanted.keys() - there.keys())),
        *_sentence("has, which this model has not,", sorted(there.keys() - wanted.keys())),
        *_sentence("has in another shape", shapes),
    ]
    if problems:
        raise UserError(f"{folder} {'; it '.join(problems)}: was it written by a run of this model?")


def _sentence(verb: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return [f"{verb} {', '.join(names[:_MAX_NAMED])}{more}"]


def _read(folder: Path, state: dict) -> dict:
    try:
        return dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
    except CheckpointException as failure:
        reasons = {rank: describe(error) for rank, (error, _) in failure.failures.items()}
        listed = "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
        raise UserError(f"{folder} cannot be read ({listed}); choose another checkpoint.") from failure


def _zero_padding(model: ModelParts, optimizer: MegatronOptimizer | None) -> None:
    """The rows beyond the vocabulary are in no checkpoint: they are zero, as after loading Hugging Face weights."""
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
    """Continue at the saved step; everything else of the schedule is this run's configuration's.

    Returns a sentence that names what of it differs from the saved one, and is read.
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
