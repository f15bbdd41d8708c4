"""Lists the tensors in which two checkpoints differ, and by how much; two tensors are in memory at
a time."""

from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any

import torch

from checkpoints_tools.command_line import progress
from checkpoints_tools.contents import Contents
from checkpoints_tools.stored_tensors import CheckpointTensor

CHUNK = 1 << 22  # values compared at once, in float64


@dataclass(frozen=True)
class Change:
    """A tensor that differs."""

    name: str
    num_values: int
    num_different: int
    """Values that are not equal bit for bit."""
    largest: float
    """max |A - B|; NaN if a value is not finite."""
    relative: float
    """A - B| / |A|, Euclidean; inf if A is zero, NaN if a value is not finite.
    """


@dataclass(frozen=True)
class Diff:
    """The differences of two checkpoints."""

    num_equal: int
    changed: list[Change]
    unlike: dict[str, tuple[str, str]]
    """Name -> (in A, in B) as words, for another shape or dtype."""
    only_a: list[str]
    only_b: list[str]

    @property
    def is_empty(self) -> bool:
        return not (self.changed or self.unlike or self.only_a or self.only_b)

    def as_json(self) -> dict[str, Any]:
        return {"equal": self.is_empty, **asdict(self)}


def diff(a: Contents, b: Contents, pattern: str = "*") -> Diff:
    """Compare the tensors with matching names, independently of their cut over ranks."""
    names_a, names_b = ({name for name in side.tensors if fnmatch(name, pattern)} for side in (a, b))
    unlike: dict[str, tuple[str, str]] = {}
    changed: list[Change] = []
    both = sorted(names_a & names_b)
    with progress("compare", sum(a.tensors[name].num_bytes for name in both), "bytes") as advance:
        for name in both:
            words = _words(a.tensors[name]), _words(b.tensors[name])
            if words[0] != words[1]:
                unlike[name] = words
            elif change := compare(name, a.folder.read(name), b.folder.read(name)):
                changed.append(change)
            advance(a.tensors[name].num_bytes)
    num_equal = len(both) - len(unlike) - len(changed)
    return Diff(num_equal, changed, unlike, sorted(names_a - names_b), sorted(names_b - names_a))


def compare(name: str, a: torch.Tensor, b: torch.Tensor) -> Change | None:
    """Return None if they are equal bit for bit: NaN equals the same NaN, and 0 is not -0."""
    a = a.reshape(-1)
    b = b.reshape(-1)
    num_different = 0
    largest = torch.zeros((), dtype=torch.float64)
    square = 0.0
    square_a = 0.0
    for first in range(0, a.numel(), CHUNK):
        part_a = a[first : first + CHUNK]
        part_b = b[first : first + CHUNK]
        bits = torch.stack([part.contiguous().view(torch.uint8).view(-1, a.itemsize) for part in (part_a, part_b)])
        num_different += int((bits[0] != bits[1]).any(dim=1).sum())
        wide_a = part_a.double()
        wide_b = part_b.double()
        distance = (wide_a - wide_b).abs()
        largest = torch.maximum(largest, distance.max())  # NaN stays
        square = square + float(distance.square().sum())
        square_a = square_a + float(wide_a.square().sum())
    if not num_different:
        return None
    relative = (square / square_a) ** 0.5 if square_a else (float("inf") if square else 0.0)
    return Change(name, a.numel(), num_different, float(largest), relative)


def _words(tensor: CheckpointTensor) -> str:
    return f"{' x '.join(map(str, tensor.shape)) or 'one value'} {str(tensor.dtype).removeprefix('torch.')}"
