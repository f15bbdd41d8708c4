"""Folders of .safetensors files, read by slices and written tensor after tensor.

No rank ever holds a whole file. The format: 8 bytes of header length, a JSON header {name: {dtype,
shape, data_offsets}}, then the tensors' bytes without gaps.

The library checks headers and, in the tests, our output. It maps files: their pages would count as
this process's memory, and a failing disk would end the process. So slices are read here. It also
writes whole files only.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_dapo.common.bounded import read_json
from megatron_dapo.common.errors import UserError
from megatron_dapo.huggingface.model_tensors import ServedTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK_BYTES = 64 * 2**20
_NUM_SHOWN = 5
_MAX_INDEX = 256 << 20  # bytes: of a million tensors


@dataclass(frozen=True)
class TensorSpec:
    """A full tensor under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    with_previous: bool = False
    """Whether a server takes it only in one call with the tensor before it."""

    served: ServedTensor | None = None
    """A server's form of it; None for the tensor itself, whole on every rank."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorBytes:
    """The place of a tensor in its file."""

    dtype: str  # the format's name
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    num_bytes: int


@dataclass(frozen=True)
class StoredFile:
    """The header of one file; tensors in the order of their bytes."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, TensorBytes]

    @classmethod
    def read(cls, path: Path) -> "StoredFile":
        """Read the header.

        Raises UserError for a missing or damaged file, or a length unlike the header's.
        """
        try:
            # the library checks the header
            with path.open("rb") as file, safe_open(path, framework="pt"):
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except OSError as error:
            raise UserError(f"`{path}` cannot be read ({error.strerror}); copy or download it again.") from error
        except SafetensorError as error:
            size = path.stat().st_size
            raise UserError(
                f"`{path}` is not a safetensors file, or damaged ({error}; it has {size} bytes); copy or download it "
                "again."
            ) from error
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = fields["data_offsets"]
            tensors[name] = TensorBytes(fields["dtype"], tuple(fields["shape"]), 8 + length + begin, end - begin)
        return cls(path, metadata, tensors)


class SafetensorsFolder:
    """The tensors of a Hugging Face checkpoint, found through its index, or in all .safetensors
    files.

    key: the setting that named the folder, for messages. Raises UserError for missing, damaged or
    misplaced files and tensors.
    """

    def __init__(self, path: str | Path, key: str = "actor_rollout_ref.model.path") -> None:
        self.path = Path(path)
        self._key = key
        if not self.path.is_dir():
            raise UserError(f"{key}: `{path}` is not a folder; give that of a Hugging Face checkpoint.")
        self.index = self._read_index()
        weight_map = self.index["weight_map"] if self.index is not None else {}
        if weight_map:
            names = list(dict.fromkeys(weight_map.values()))
            self._check_names(names)
            if absent := [name for name in names if not (self.path / name).is_file()]:
                raise UserError(
                    f"{key}: `{path}` lacks {listed(absent)} of its index; copy or download what is missing."
                )
        else:
            names = sorted(file.name for file in self.path.glob("*.safetensors"))
            if not names:
                raise UserError(
                    f"{key}: `{path}` has no .safetensors file; convert the checkpoint to that format "
                    "(save_pretrained of transformers writes it)."
                )
        self.files = {name: StoredFile.read(self.path / name) for name in names}
        self._file_of = {tensor: file for file in self.files.values() for tensor in file.tensors}
        times = Counter(tensor for file in self.files.values() for tensor in file.tensors)
        if twice := [name for name, number in times.items() if number > 1]:
            raise UserError(f"{key}: `{path}` has {listed(twice)} in several files; keep the right one of each.")
        self._check_index(weight_map)

    def _read_index(self) -> dict[str, Any] | None:
        """Return the index; None without one, or for one without tensors."""
        file = self.path / INDEX
        if not file.is_file():
            return None
        try:
            index = read_json(file, _MAX_INDEX)
            if not isinstance(index.get("metadata", {}), dict):
                raise ValueError("metadata is not an object")
            return index if index["weight_map"].values() else None
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
            raise UserError(f"{self._key}: `{file}` is not an index of tensors; copy or download it again.") from error

    def _check_names(self, names: Sequence[object]) -> None:
        """Check the file names of an index: files are written again under these names."""
        if wrong := [str(name) for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise UserError(
                f"{self._key}: the index of `{self.path}` names {listed(wrong)}; put all files into the folder itself."
            )
        if SINGLE not in names and (self.path / SINGLE).is_file():
            raise UserError(
                f"{self._key}: `{self.path}` has {SINGLE}, which transformers reads, and an index of other files; "
                "remove what is not meant."
            )

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        wrong = [name for name, file in weight_map.items() if name not in self.files[file].tensors]
        if wrong:
            raise UserError(
                f"{self._key}: in `{self.path}` the index names {listed(wrong)} in files that do not have them; "
                "copy or download the checkpoint again."
            )

    def tensor(self, name: str) -> TensorBytes:
        """Return the place of a tensor."""
        return self._file_of[name].tensors[name]

    @property
    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def check(
        self, expected: Mapping[str, tuple[int, ...]], may_have: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Raise UserError for tensors missing, unexpected, of another shape or of an unusable type.

        It counts them and names the first few of each kind. expected: name -> shape. may_have:
        harmless names outside the model's parameters.
        """
        missing = [name for name in expected if name not in self._file_of]
        extra = [name for name in self._file_of if name not in expected and not may_have(name)]
        common = [name for name in expected if name in self._file_of]
        misshapen = [
            f"{name} {list(self.tensor(name).shape)} for {list(expected[name])}"
            for name in common
            if self.tensor(name).shape != tuple(expected[name])
        ]
        typed = [f"{name} ({self.tensor(name).dtype})" for name in common if self.tensor(name).dtype not in DTYPES]
        kinds = {"missing": missing, "unexpected": extra, "of another shape": misshapen, "of another type": typed}
        problems = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]
        if problems:
            raise UserError(
                f"{self._key}: the tensors of `{self.path}` are not those of its config.json, {'; '.join(problems)}; "
                "use the config.json and all files of one checkpoint."
            )

    def read(
        self,
        name: str,
        dim: int | None = None,
        rank: int = 0,
        size: int = 1,
        padded: int | None = None,
        blocks: Sequence[int] = (),
    ) -> Tensor:
        """Read a rank's share of a tensor, on the CPU. Raises OSError.

        Args:
            dim: axis of the cut (0 or 1); None for all of the tensor.
            size: number of the ranks with a share.
            padded: the length along dim before sharing; rows after the file's are zero.
            blocks: heights of the blocks in it, one below the other, each cut along its rows; ()
                for none.
        """
        if dim is None:
            return self._rows(name, 0, None)
        if blocks:
            ends = zip(accumulate(blocks), blocks, strict=True)
            return torch.cat([self._share(name, end - height, height, rank, size) for end, height in ends])
        length = self.tensor(name).shape[dim]
        share = (padded or length) // size
        start = min(rank * share, length)
        end = min((rank + 1) * share, length)
        if dim == 1:
            return self._columns(name, start, end)
        part = self._rows(name, start, end)
        missing = share - part.shape[0]
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part

    def _share(self, name: str, start: int, height: int, rank: int, size: int) -> Tensor:
        """Read a rank's share of the rows from `start` on."""
        share = height // size
        return self._rows(name, start + rank * share, start + (rank + 1) * share)

    def read_row(self, name: str, row: int) -> Tensor:
        """Read one tensor of a stack, on the CPU. Raises OSError."""
        return self._rows(name, row, row + 1)[0]

    def _columns(self, name: str, start: int, end: int) -> Tensor:
        rows, columns = self.tensor(name).shape
        if (start, end) == (0, columns):
            return self._rows(name, 0, rows)
        out = torch.empty(rows, end - start, dtype=DTYPES[self.tensor(name).dtype])
        block = max(1, _BLOCK_BYTES // (columns * out.element_size()))
        for row in range(0, rows, block):
            out[row : row + block] = self._rows(name, row, min(row + block, rows))[:, start:end]
        return out

    def _rows(self, name: str, start: int, end: int | None) -> Tensor:
        """Read rows start to end; None for the whole tensor, of any shape."""
        stored = self.tensor(name)
        dtype = DTYPES[stored.dtype]
        shape = stored.shape if end is None else (end - start, *stored.shape[1:])
        out = torch.empty(shape, dtype=dtype)
        row_bytes = math.prod(stored.shape[1:]) * dtype.itemsize if end is not None else 0
        with self._file_of[name].path.open("rb", buffering=0) as file:
            file.seek(stored.start + start * row_bytes)
            rest = _memory(out)
            while len(rest):
                if not (count := file.readinto(rest)):
                    raise OSError(f"{file.name} ended early")
                rest = rest[count:]
        return out

    def equal(self, a: str, b: str) -> bool:
        """Return whether two tensors are the same to the bit, compared in blocks of rows."""
        first = self.tensor(a)
        second = self.tensor(b)
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        step = max(1, _BLOCK_BYTES // max(1, first.num_bytes // first.shape[0]))
        bounds = [(row, min(row + step, first.shape[0])) for row in range(0, first.shape[0], step)]
        return all(torch.equal(byte_view(self._rows(a, *rows)), byte_view(self._rows(b, *rows))) for rows in bounds)


def byte_view(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor's bytes, [n] uint8, without a copy."""
    return tensor.view(-1).view(torch.uint8)


def _memory(tensor: Tensor) -> memoryview:
    """Return the same in the form for reading from and writing to files.

    After `tensor.numpy()` its storage could not be resized: see training/parked.py.
    """
    # numpy 2.4's types call it a buffer only from Python 3.12 on
    array: Any = np.from_dlpack(byte_view(tensor))
    if not array.flags.writeable:  # an older NumPy or torch
        array = byte_view(tensor).numpy()
    return memoryview(array)


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and the number of the others."""
    more = len(names) - _NUM_SHOWN
    return ", ".join(names[:_NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")


class FileWriter:
    """Writes one .safetensors file, tensor after tensor in the given order.

    Then call `finish`, and `close` in any case. Metadata and order as in the library's own
    `save_file` (by type, then name: `file_order`) give the same bytes.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> None:
        """Open the file and write the header. Raises OSError."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self._expected = 0
        for spec in specs:
            start = self._expected
            self._expected += spec.num_bytes
            header[spec.name] = {
                "dtype": _NAME_OF[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [start, self._expected],
            }
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        self._file = path.open("wb", buffering=0)
        self._written = 0
        self._put(memoryview(len(raw).to_bytes(8, "little") + raw))
        self._written = 0

    def write(self, values: Tensor) -> None:
        """Write the next bytes: a whole tensor or a part of one, on the CPU. Raises OSError."""
        self._put(_memory(values.contiguous()))

    def _put(self, rest: memoryview) -> None:
        self._written += len(rest)
        while len(rest):
            rest = rest[self._file.write(rest) :]

    def finish(self) -> None:
        """Flush to the disk, after the last tensor. Raises OSError."""
        assert self._written == self._expected, "a tensor was left out"
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return the safetensors library's order of tensors: wider types first, then by name."""
    return sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))
