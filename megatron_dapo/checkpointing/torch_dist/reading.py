"""Reads the pickles of a `torch_dist` folder without running any code they name.

A pickle can call any function. So the index is read into inert records; torch's own classes are
made from them after every value was checked. The files beside it may hold only tensors and plain
values.
"""

import pickle
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.garbage import collection_paused

INDEX = ".metadata"
COMMON_FILE = "common.pt"
MAX_INDEX_BYTES = 2**30  # some 200 bytes per piece of a tensor: five million pieces
MAX_OBJECT_BYTES = 2**24  # of a rank's generators, or of the state common to all ranks: tens of KB
_MAX_DIMS = 64  # torch's own limit
_MAX_SIZE = 2**63


class PickledObject:
    """An object of a pickle: its arguments and its state, kept and not used."""

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "PickledObject":
        record = super().__new__(cls)
        record.arguments = arguments
        record.state = None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(PickledObject):
    __slots__ = ()


class _Tensor(PickledObject):
    __slots__ = ()


class _Bytes(PickledObject):
    __slots__ = ()


class _Chunk(PickledObject):
    __slots__ = ()


class _Properties(PickledObject):
    __slots__ = ()


class _Key(PickledObject):
    __slots__ = ()


class _Location(PickledObject):
    __slots__ = ()


class _Size(PickledObject):
    __slots__ = ()


_METADATA = "torch.distributed.checkpoint.metadata"
_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
_KNOWN: dict[tuple[str, str], type[PickledObject] | torch.dtype] = {
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES},
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    (_METADATA, "ChunkStorageMetadata"): _Chunk,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "MetadataIndex"): _Key,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Location,
    ("torch", "Size"): _Size,
    # unused here: the place of writing, and the layout of a tensor in memory
    (_METADATA, "StorageMeta"): PickledObject,
    (_METADATA, "_MEM_FORMAT_ENCODING"): PickledObject,
    ("torch.serialization", "_get_layout"): PickledObject,
    ("pathlib", "PosixPath"): PickledObject,
    ("builtins", "getattr"): PickledObject,  # a member of an enum, as Python 3.11.0 to 3.11.3 write it
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise ValueError(f"it names {module}.{name}, which no index needs and which was not run")
        return _KNOWN[module, name]


@collection_paused()
def read_index(folder: Path) -> Metadata:
    """Return the index: each tensor's shape, dtype and chunks, and the file of each chunk.

    Raises UserError, naming the file, if it is missing or is not an index.
    """
    path = folder / INDEX
    if not path.is_file():
        raise UserError(f"{folder} is no torch_dist checkpoint: it has no {INDEX}; give the folder of a checkpoint.")
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes, an index has at most {MAX_INDEX_BYTES}")
        with path.open("rb") as file:
            content = _state(_IndexUnpickler(file).load(), _Metadata)
        return Metadata(
            {_text(name): _entry(entry) for name, entry in content["state_dict_metadata"].items()},
            storage_data={_key(key): _location(where) for key, where in content["storage_data"].items()},
        )
    except Exception as error:  # a damaged pickle may raise any error
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); use another checkpoint.") from error


def read_common(folder: Path) -> dict[str, Any]:
    """Return the state common to all ranks: layout, dtype, counts. Raises UserError, naming the
    file."""
    path = folder / COMMON_FILE
    try:
        require_file(path)
        with path.open("rb") as file:
            common = load_plain(file)["common"]
        if not isinstance(common, dict):
            raise TypeError("it holds no dictionary")
        return common
    except Exception as error:  # a damaged file may raise any error
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is damaged ({type(error).__name__}: {reason}); use another checkpoint.") from error


def load_plain(file: BinaryIO, *allowed: tuple[type, str]) -> Any:
    """Return data written by torch.save: tensors and plain values. Raises for anything else, and
    for more than MAX_OBJECT_BYTES, packed or not. allowed: as in `only_plain`."""
    with zipfile.ZipFile(file) as archive:
        num_bytes = sum(entry.file_size for entry in archive.infolist())
    if max(num_bytes, file.tell()) > MAX_OBJECT_BYTES:
        raise ValueError(f"it unpacks to {num_bytes} bytes, at most {MAX_OBJECT_BYTES} are expected")
    file.seek(0)
    return _load(file, *allowed)


def load_tensor(file: BinaryIO) -> torch.Tensor:
    """Return a tensor that torch.save wrote. Raises for everything else."""
    values = _load(file)
    if not isinstance(values, torch.Tensor):
        raise ValueError(f"{type(values).__name__} in place of a tensor")
    return values


def _load(file: BinaryIO, *allowed: tuple[type, str]) -> Any:
    with only_plain(*allowed):
        return torch.load(file, map_location="cpu", weights_only=True)


@contextmanager
def only_plain(*allowed: tuple[type, str]) -> Iterator[None]:
    """Let torch.load make only tensors and plain values during the block: Megatron allows more in
    the whole process. allowed: (class, full name that it replaces)."""
    before = get_safe_globals()
    clear_safe_globals()
    add_safe_globals(list(allowed))
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def require_file(path: Path) -> None:
    """Raise OSError for a pipe or a device, since reading could block forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is not a file")


def _state(record: Any, kind: type[PickledObject]) -> Any:
    if type(record) is not kind:
        raise TypeError(f"{type(record).__name__} in place of {kind.__name__}")
    return record.state


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} in place of a text")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_SIZE:
        raise ValueError("an invalid size or position")
    return value


def _size(record: Any) -> torch.Size:
    if type(record) is not _Size:
        raise TypeError(f"{type(record).__name__} in place of a shape")
    (sizes,) = record.arguments
    if len(sizes) > _MAX_DIMS:
        raise ValueError(f"a shape of {len(sizes)} dimensions")
    return torch.Size([_number(each) for each in sizes])


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record) is _Bytes:
        return BytesStorageMetadata()
    state = _state(record, _Tensor)
    dtype, *_ = _state(state["properties"], _Properties)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{type(dtype).__name__} in place of a dtype")
    size = _size(state["size"])
    return TensorStorageMetadata(TensorProperties(dtype), size, [_chunk(chunk, size) for chunk in state["chunks"]])


def _chunk(record: Any, whole: torch.Size) -> ChunkStorageMetadata:
    state = _state(record, _Chunk)
    chunk = ChunkStorageMetadata(_size(state["offsets"]), _size(state["sizes"]))
    ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    if any(end > size for end, size in zip(ends, whole, strict=True)):
        raise ValueError(f"a piece up to {tuple(ends)} of a tensor of shape {tuple(whole)}")
    return chunk


def _key(record: Any) -> MetadataIndex:
    state = _state(record, _Key)
    offset = state.get("offset")
    return MetadataIndex(_text(state["fqn"]), None if offset is None else _size(offset))


def _location(record: Any) -> _StorageInfo:
    state = _state(record, _Location)
    name = _text(state["relative_path"])
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no file of the folder")
    if state.get("transform_descriptors"):
        raise ValueError("its files are packed, which this program does not write")
    return _StorageInfo(name, _number(state["offset"]), _number(state["length"]))
