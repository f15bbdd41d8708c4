"""The content of a `torch_dist` folder, read in one process without Megatron: the index at once,
tensors one by one."""

import io
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_dapo.checkpointing.torch_dist.reading import (
    COMMON_FILE,
    INDEX,
    load_tensor,
    read_common,
    read_index,
    require_file,
)
from megatron_dapo.common.errors import UserError


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, stored as `length` bytes of `file` from `start` on."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class CheckpointTensor:
    """A whole tensor by its shape; `pieces` is how the ranks cut it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def num_values(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize


class TensorFolder:
    """A folder of tensors. tensors: by name, sorted. objects: names of other stored objects. Raises
    UserError if there is none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = read_index(folder)
        entries = sorted(index.state_dict_metadata.items())
        tensors = [(name, entry) for name, entry in entries if isinstance(entry, TensorStorageMetadata)]
        self.tensors = {name: _stored(folder, name, entry, index) for name, entry in tensors}
        self.objects = [name for name, _ in entries if name not in self.tensors]

    def common(self) -> dict[str, Any]:
        """Return the numbers and words saved beside the tensors: layout, dtype, counts; {} without
        any. Raises UserError for any other content."""
        if not (self._folder / COMMON_FILE).exists():  # the manifest's findings say so
            return {}
        return json.loads(json.dumps(read_common(self._folder), default=str))

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor. Raises UserError naming it if its file is missing, cut or
        damaged."""
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for piece, values in self._pieces(stored):
            box = tuple(slice(a, a + size) for a, size in zip(piece.offset, piece.shape, strict=True))
            whole[box] = values
        return whole

    def _pieces(self, stored: CheckpointTensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        for piece in stored.pieces:
            try:
                require_file(self._folder / piece.file)
                with (self._folder / piece.file).open("rb") as file:
                    file.seek(piece.start)
                    content = io.BytesIO(file.read(piece.length))
                yield piece, load_tensor(content).view(piece.shape)
            except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
                reason = str(error).partition("\n")[0]
                raise UserError(f"{stored.name} cannot be read from {self._folder / piece.file}: {reason}.") from error


def _stored(folder: Path, name: str, entry: TensorStorageMetadata, index: Metadata) -> CheckpointTensor:
    boxes = []
    for chunk in entry.chunks:
        where = index.storage_data.get(MetadataIndex(name, chunk.offsets))
        if where is None:
            raise UserError(f"{folder / INDEX} is damaged: it lacks the position of {name}; use another checkpoint.")
        boxes.append(Piece(tuple(chunk.offsets), tuple(chunk.sizes), where.relative_path, where.offset, where.length))
    return CheckpointTensor(name, tuple(entry.size), entry.properties.dtype, tuple(boxes))
