"""What a `torch_dist` folder holds, read on one process without Megatron: the index at once, tensors one by one.

The index and the tensors are pickles. Only the names that a checkpoint consists of are resolved here, so that looking
at somebody else's checkpoint runs none of its code.
"""

import io
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.common.errors import UserError

INDEX = ".metadata"
COMMON = "common.pt"
_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)),
    *((_METADATA, f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and where it lies: `length` bytes of `file` from `start` on."""

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
    """tensors: by name, sorted. objects: names of what is stored beside them. Raises UserError where there is none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tensors, self.objects = _read_index(folder / INDEX)

    def common(self) -> dict[str, Any]:
        """Return numbers and words that were saved beside the tensors: layout, dtype, counts. {} where there are
        none."""
        try:
            content = torch.load(self._folder / COMMON, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError):  # the manifest's verdict says why
            return {}
        plain = content.get("common") if isinstance(content, dict) else None
        return json.loads(json.dumps(plain, default=str)) if isinstance(plain, dict) else {}

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor. Raises UserError naming it where its file is missing, cut or damaged."""
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for piece, values in self._pieces(stored):
            box = tuple(slice(a, a + size) for a, size in zip(piece.offset, piece.shape, strict=True))
            whole[box] = values
        return whole

    def _pieces(self, stored: CheckpointTensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        for piece in stored.pieces:
            try:
                with (self._folder / piece.file).open("rb") as file:
                    file.seek(piece.start)
                    content = io.BytesIO(file.read(piece.length))
                values = torch.load(content, map_location="cpu", weights_only=True)
                yield piece, values.view(piece.shape)
            except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
                reason = str(error).partition("\n")[0]
                raise UserError(f"{stored.name} cannot be read from {self._folder / piece.file}: {reason}.") from error


def _stored(name: str, entry: Any, where: dict) -> CheckpointTensor:
    slices = []
    for chunk in entry.chunks:
        offset = tuple(chunk.offsets)
        info = where[name, offset]
        slices.append(Piece(offset, tuple(chunk.sizes), info.relative_path, info.offset, info.length))
    return CheckpointTensor(name, tuple(entry.size), entry.properties.dtype, tuple(slices))


def _read_index(path: Path) -> tuple[dict[str, CheckpointTensor], list[str]]:
    """Return (tensors, names of other objects). Raises UserError."""
    if not path.is_file():
        raise UserError(
            f"{path.parent} is no torch_dist checkpoint: it has no {INDEX}; give the folder of a checkpoint."
        )
    try:
        index = _Unpickler(io.BytesIO(path.read_bytes())).load()
        where = {(key.fqn, tuple(key.offset or ())): info for key, info in index.storage_data.items()}
        entries = sorted(index.state_dict_metadata.items())
        tensors = {name: _stored(name, entry, where) for name, entry in entries if hasattr(entry, "chunks")}
    except Exception as error:  # whatever a damaged pickle may raise
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); take another checkpoint.") from error
    return tensors, [name for name, entry in entries if not hasattr(entry, "chunks")]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if (module, name) in _KNOWN else _Unknown


class _Unknown:
    """In place of an object that says nothing about tensors."""

    def __new__(cls, *arguments: Any, **options: Any) -> "_Unknown":
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take what the real one takes, and keep nothing."""

    def __setstate__(self, state: Any) -> None:
        """Take the state that the real one takes, and keep nothing."""
