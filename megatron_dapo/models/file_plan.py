"""The files of a Hugging Face checkpoint, and the order of the tensors in them."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import hf_tensors
from megatron_dapo.models.safetensors_files import DTYPES, SINGLE, SafetensorsFolder, TensorSpec, file_order
from megatron_dapo.models.weight_map import stored_dtype

_FILE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class FilePlan:
    """The division of tensors into files."""

    files: dict[str, list[str]]
    """Name -> its tensors, in the order of their bytes."""
    metadata: dict[str, dict[str, str]]
    """Name -> the header's own entries."""
    index: dict[str, Any] | None
    """Metadata of the index; None for a single file without index."""
    num_bytes: int
    """Bytes of all tensors, as planned."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Types, in a file's words, of tensors in another type than `stored_dtype`."""

    @classmethod
    def standard(cls, spec: ModelSpec, dtype: torch.dtype, file_bytes: int = _FILE_BYTES) -> "FilePlan":
        """Divide into files named as by transformers, of at most file_bytes (or one tensor).

        The same for every layout.
        """
        parts: list[list[TensorSpec]] = []
        size = 0
        for name, shape in hf_tensors(spec).items():
            tensor = TensorSpec(name, shape, stored_dtype(name, dtype))
            if not parts or size + tensor.num_bytes > file_bytes:
                parts.append([])
                size = 0
            parts[-1].append(tensor)
            size += tensor.num_bytes
        num_bytes = sum(tensor.num_bytes for part in parts for tensor in part)
        names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
        if len(parts) == 1:
            names = [SINGLE]
        files = {name: [tensor.name for tensor in file_order(part)] for name, part in zip(names, parts, strict=True)}
        index = {"total_size": num_bytes} if len(parts) > 1 else None
        return cls(files, {name: {"format": "pt"} for name in names}, index, num_bytes)

    @classmethod
    def of(cls, folder: SafetensorsFolder, tensors: Collection[str]) -> "FilePlan":
        """Repeat the files of an existing checkpoint, with only the given tensors."""
        files = {}
        for name, file in folder.files.items():
            kept = [tensor for tensor in file.tensors if tensor in tensors]
            if kept:
                files[name] = kept
        metadata = {name: folder.files[name].metadata for name in files}
        index = None if folder.index is None else folder.index.get("metadata", {})
        stored = {tensor: folder.tensor(tensor) for kept in files.values() for tensor in kept}
        num_bytes = sum(tensor.num_bytes for tensor in stored.values())
        dtypes = {
            name: tensor.dtype
            for name, tensor in stored.items()
            if stored_dtype(name, torch.bfloat16) == torch.float32 != DTYPES[tensor.dtype]
        }
        return cls(files, metadata, index, num_bytes, dtypes)

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the type of a tensor in files of this type."""
        return DTYPES[self.dtypes[name]] if name in self.dtypes else stored_dtype(name, dtype)

    def index_json(self, num_bytes: int) -> str | None:
        """Return the index as transformers writes it; None without one.

        num_bytes: of all tensors, really written.
        """
        if self.index is None:
            return None
        metadata = self.index if num_bytes == self.num_bytes else {**self.index, "total_size": num_bytes}
        weight_map = {tensor: name for name, tensors in self.files.items() for tensor in tensors}
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)
