"""A checkpoint folder as data: its existing parts of manifest, state, model and tensors."""

import json
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from checkpoints_tools.command_line import progress
from checkpoints_tools.stored_tensors import CheckpointTensor, TensorFolder
from megatron_dapo.checkpointing.folders import TRAINER_STATE
from megatron_dapo.checkpointing.manifest import MANIFEST, read_manifest, verify
from megatron_dapo.checkpointing.torch_dist.reading import INDEX
from megatron_dapo.common.errors import UserError
from megatron_dapo.storage.model_folder import HF, MEGATRON

OPTIMIZER_PREFIX = "optimizer."
_MODEL_KEYS = (
    "model_type num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size "
    "tie_word_embeddings num_experts num_local_experts num_experts_per_tok moe_intermediate_size"
).split()


@dataclass(frozen=True)
class Contents:
    """The content of a checkpoint folder."""

    path: Path
    num_files: int
    num_bytes: int
    damage: tuple[str, ...]
    """A phrase per fault of the files; empty for a whole folder."""
    extra: tuple[str, ...]
    """Unlisted files."""
    contents: tuple[str, ...]
    versions: dict[str, str]
    state: dict[str, Any]
    """Of trainer.json, without the config."""
    common: dict[str, Any]
    """Saved beside the tensors, such as layout and optimizer steps."""
    model: dict[str, Any]
    """The sizes in hf/config.json."""
    tensors: dict[str, CheckpointTensor]
    objects: list[str]
    folder: TensorFolder = field(repr=False)

    @classmethod
    def of(cls, path: Path, verify: bool = False) -> "Contents":
        """Read the contents of a checkpoint folder, or of a single torch_dist folder.

        With `verify`, checksums are compared too. Raise UserError if there are no tensors to show.
        """
        if not path.is_dir():
            raise UserError(f"{path} is not a folder here; give the folder of a checkpoint.")
        if path.resolve().name == MEGATRON and (path.resolve().parent / MANIFEST).is_file():
            path = path.resolve().parent
        megatron = path if (path / INDEX).is_file() else path / MEGATRON
        if not megatron.is_dir():
            raise UserError(f"{path} is no checkpoint: it has no folder {MEGATRON}; give one that has (step_000012).")
        tensors = TensorFolder(megatron)
        files = [file for file in path.rglob("*") if file.is_file()]
        damage, extra, contents, versions = _manifest(path, verify)
        return cls(
            path=path,
            num_files=len(files),
            num_bytes=sum(file.stat().st_size for file in files),
            damage=damage,
            extra=extra,
            contents=contents,
            versions=versions,
            state=_state(path),
            common=tensors.common(),
            model=_model(path),
            tensors=tensors.tensors,
            objects=tensors.objects,
            folder=tensors,
        )

    def totals(self, pattern: str = "*") -> dict[str, dict[str, Any]]:
        """Return part (model, optimizer) -> number of tensors, values and bytes, tensors per
        dtype."""
        parts: dict[str, dict[str, Any]] = {}
        for name, tensor in self.tensors.items():
            if not fnmatch(name, pattern):
                continue
            empty = {"num_tensors": 0, "num_values": 0, "num_bytes": 0, "dtypes": Counter()}
            part = parts.setdefault(_part_of(name), empty)
            part["num_tensors"] += 1
            part["num_values"] += tensor.num_values
            part["num_bytes"] += tensor.num_bytes
            part["dtypes"][str(tensor.dtype).removeprefix("torch.")] += 1
        return parts

    def as_json(self, pattern: str = "*") -> dict[str, Any]:
        return {
            "path": str(self.path),
            "num_files": self.num_files,
            "num_bytes": self.num_bytes,
            "is_whole": not self.damage,
            "damage": list(self.damage),
            "not_in_manifest": list(self.extra),
            "contents": list(self.contents),
            "versions": self.versions,
            "state": self.state,
            "common": self.common,
            "model": self.model,
            "totals": self.totals(pattern),
            "objects": self.objects,
            "tensors": [_as_json(tensor) for tensor in self.tensors.values() if fnmatch(tensor.name, pattern)],
        }


def _as_json(tensor: CheckpointTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "num_bytes": tensor.num_bytes,
        "pieces": [{"offset": list(p.offset), "shape": list(p.shape), "file": p.file} for p in tensor.pieces],
    }


def _part_of(name: str) -> str:
    return "optimizer" if name.startswith(OPTIMIZER_PREFIX) else "model"


def _manifest(path: Path, contents: bool) -> tuple:
    """Return (damage, extra, contents, versions)"""
    try:
        manifest = read_manifest(path)
    except UserError:  # the findings say why
        return verify(path).damage, (), (), {}
    if contents:
        with progress("checksums", manifest.num_bytes, "bytes") as advance:
            findings = verify(path, advance=advance)
    else:
        findings = verify(path, contents=False)
    return findings.damage, findings.extra, manifest.contents, manifest.versions


def _state(path: Path) -> dict[str, Any]:
    """Return a state without the config itself: it is long, and its hash is there."""
    state = _json(path / TRAINER_STATE)
    return {name: value for name, value in state.items() if name != "config"}


def _model(path: Path) -> dict[str, Any]:
    config = _json(path / HF / "config.json")
    return {key: config[key] for key in _MODEL_KEYS if key in config}


def _json(path: Path) -> dict[str, Any]:
    """Return the content, or {} if the file is missing or damaged, as the manifest's findings
    reports."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
