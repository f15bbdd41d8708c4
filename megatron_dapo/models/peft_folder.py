"""Adapters in and out: a PEFT folder, the same for every layout."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.huggingface.model_tensors import linear_modules
from megatron_dapo.huggingface.peft_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config_json
from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.file_plan import FilePlan
from megatron_dapo.models.hf_io import write_folder
from megatron_dapo.models.lora import adapter_tensors, adapters_of
from megatron_dapo.models.safetensors_files import SafetensorsFolder, TensorSpec, file_order, listed
from megatron_dapo.models.weight_map import Entry
from megatron_dapo.models.weight_source import WeightSource
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.storage.staged_folder import StagedFolder

KEY = "actor_rollout_ref.model.lora_adapter_path"


def adapter_source(
    model: ModelParts, layout: ParallelLayout, value: Callable[[torch.nn.Parameter], Tensor] | None = None
) -> WeightSource:
    """Return this rank's stage's adapters under PEFT's names. value: as of `WeightSource`."""
    return WeightSource(model, layout, value, entries=_entries(model))


def _entries(model: ModelParts) -> list[Entry]:
    return [entry for adapter in adapters_of(model.chunks) for entry in adapter.entries()]


@torch.no_grad()
def load_adapters(model: ModelParts, layout: ParallelLayout, path: str | Path) -> None:
    """Fill this rank's adapters from a PEFT folder.

    Raises UserError for tensors of another model.
    """
    assert model.lora is not None, "the model has adapters"
    folder = SafetensorsFolder(path, KEY)
    expected = adapter_tensors(model.spec, model.lora)
    stored = {name: folder.tensor(name).shape for name in folder.names}
    if stored != expected:
        wrong = sorted({name for name, _ in stored.items() ^ expected.items()})
        raise UserError(
            f"{KEY} is {path}, whose tensors are not those of this model's adapters: {listed(wrong)} missing, "
            "unexpected or of another shape; give the folder of an adapter of this model."
        )
    for entry in _entries(model):
        (name,) = entry.hf_names
        try:
            place = layout.place(of_expert=entry.expert is not None)
            values = folder.read(name, entry.cut, *place, blocks=entry.blocks[0])
        except OSError as error:
            raise UserError(f"{KEY}: `{path}` cannot be read ({error}); copy it again.") from error
        entry.parameter.copy_(values)


def export_adapters(model: ModelParts, layout: ParallelLayout, base_model: str, out: str | Path) -> None:
    """Write the adapters as a PEFT folder; it appears when all is written.

    Collective over all ranks; raises UserError on all. base_model: path of their model.
    """
    lora = model.lora
    assert lora is not None, "the model has adapters"
    dtype = model.config.params_dtype
    shapes = adapter_tensors(model.spec, lora)
    tensors = [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]
    plan = FilePlan(
        files={ADAPTER_WEIGHTS: [tensor.name for tensor in file_order(tensors)]},
        metadata={ADAPTER_WEIGHTS: {"format": "pt"}},
        index=None,
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
    )

    modules = [name for name in linear_modules(model.spec) if name in lora.targets]

    def add_files(staging: Path, num_bytes: int) -> None:
        write_whole(staging / ADAPTER_CONFIG, adapter_config_json(lora, modules, base_model))

    folder = StagedFolder(out, replace=True)
    write_folder(adapter_source(model, layout), layout, plan, shapes, dtype, folder, add_files)
