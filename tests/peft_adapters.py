"""PEFT folders of random adapters for tiny checkpoints, and their meaning, without the program."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families import MODULES

WEIGHTS = "model.safetensors"


def make_adapter(
    path: Path, model: Path, rank: int, alpha: float, targets: tuple[str, ...] = MODULES, seed: int = 0
) -> dict[str, Tensor]:
    """Write a PEFT folder for a checkpoint with A and B both random, and return its tensors,
    float32. Their products are a fifth of the weights, to keep the model well conditioned."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and weight.dim() == 2:
            for kind, shape in (("A", (rank, weight.size(1))), ("B", (weight.size(0), rank))):
                values = torch.randn(shape, generator=generator) / shape[1] ** 0.5 * (0.2 if kind == "B" else 1.0)
                tensors[f"base_model.model.{module}.lora_{kind}.weight"] = values
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": modules, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return tensors


def with_adapter(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Weights by Hugging Face name, with adapters W + scale B A, in the weights' type."""
    merged = dict(weights)
    for name, weight in weights.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in tensors:
            a, b = (tensors[f"{module}.lora_{kind}.weight"].to(weight.dtype) for kind in "AB")
            merged[name] = weight.detach() + scale * (b @ a)
    return merged


def merged_checkpoint(path: Path, model: Path, tensors: Mapping[str, Tensor], scale: float) -> Path:
    """Write a copy of a checkpoint with the adapter in its weights, computed in float64;
    returns the path."""
    shutil.copytree(model, path)
    exact = with_adapter({name: weight.double() for name, weight in load_file(model / WEIGHTS).items()}, tensors, scale)
    save_file({name: weight.float() for name, weight in exact.items()}, path / WEIGHTS, metadata={"format": "pt"})
    return path
