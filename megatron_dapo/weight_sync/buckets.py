"""Plans the buckets of one pipeline stage, the same on all its ranks."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron_dapo.common.sizes import MIB
from megatron_dapo.models.safetensors_files import TensorSpec

# On CPU a large flat buffer costs more in page faults and copies than it saves in messages. One of
# 538 MB took 10 s, the same tensors one by one 1.0 s. So only small tensors are flattened there,
# into buckets of at most this size.
CPU_BUCKET_BYTES = 64 * MIB
CPU_FLAT_TENSOR_BYTES = 1 * MIB


class Source(Protocol):
    """A pipeline stage's weights under their Hugging Face names; see models/weight_source.py."""

    def specs(self) -> list[TensorSpec]: ...
    def gather(self, specs: list[TensorSpec]) -> list[Tensor] | None: ...


def num_bytes(spec: TensorSpec) -> int:
    count = spec.dtype.itemsize
    for size in spec.shape:
        count *= size
    return count


@dataclass(frozen=True)
class Bucket:
    """Tensors of one update call. flat: sent as one buffer, tensor after tensor; otherwise one
    broadcast per tensor."""

    specs: tuple[TensorSpec, ...]
    flat: bool

    @cached_property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    @cached_property
    def dtypes(self) -> list[str]:
        return [str(spec.dtype).removeprefix("torch.") for spec in self.specs]

    @cached_property
    def shapes(self) -> list[list[int]]:
        return [list(spec.shape) for spec in self.specs]

    @cached_property
    def num_bytes(self) -> int:
        return _sum_bytes(self.specs)


@dataclass(frozen=True)
class Plan:
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def num_tensors(self) -> int:
        return sum(len(bucket.specs) for bucket in self.buckets)

    @property
    def flat_bytes(self) -> int:
        """Return the size of the largest flat bucket in bytes."""
        return max((bucket.num_bytes for bucket in self.buckets if bucket.flat), default=0)

    @property
    def names(self) -> list[str]:
        return [name for bucket in self.buckets for name in bucket.names]

    def digest(self) -> str:
        """Return a text that identifies the buckets, tensors, shapes and dtypes with their
        order."""
        rows = [(bucket.flat, bucket.names, bucket.dtypes, bucket.shapes) for bucket in self.buckets]
        return hashlib.sha256(repr(rows).encode()).hexdigest()


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int, flat_tensor_bytes: int) -> Plan:
    """Put every tensor in exactly one bucket; a bucket holds at most bucket_bytes unless it is a
    single larger tensor.

    Tensors of at most flat_tensor_bytes share flat buckets, and so do larger ones of float8, which
    gloo does not send. In a flat bucket wide dtypes come first, since the server cuts the buffer at
    multiples of the item size. Otherwise the order is that of specs. Linked tensors
    (`TensorSpec.with_previous`) count as one.
    """
    flat_limit = min(flat_tensor_bytes, bucket_bytes)
    units = _units(specs)
    flat = [unit for unit in units if _is_flat(unit, flat_limit)]
    single = [unit for unit in units if not _is_flat(unit, flat_limit)]
    return Plan(
        (
            *(Bucket(_wide_first(group), flat=True) for group in _fill(flat, bucket_bytes)),
            *(Bucket(group, flat=False) for group in _fill(single, bucket_bytes)),
        )
    )


def plan_for(device: torch.device, specs: Sequence[TensorSpec], bucket_size_mb: int) -> Plan:
    """Return the plan on this kind of device; bucket_size_mb is `weight_sync.bucket_size_mb`."""
    bucket_bytes = bucket_size_mb * MIB
    if device.type == "cpu":
        return plan_buckets(specs, min(bucket_bytes, CPU_BUCKET_BYTES), CPU_FLAT_TENSOR_BYTES)
    return plan_buckets(specs, bucket_bytes, bucket_bytes)


def handle_plan(device: torch.device, specs: Sequence[TensorSpec], bucket_size_mb: int) -> Plan:
    """Return the plan of a push by handles: every bucket is one buffer."""
    bucket_bytes = min(bucket_size_mb * MIB, CPU_BUCKET_BYTES) if device.type == "cpu" else bucket_size_mb * MIB
    return plan_buckets(specs, bucket_bytes, bucket_bytes)


def _units(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """Return the tensors in their order, linked ones in one list."""
    units: list[list[TensorSpec]] = []
    for spec in specs:
        if spec.with_previous:
            units[-1].append(spec)
        else:
            units.append([spec])
    return units


def _is_flat(unit: Sequence[TensorSpec], flat_limit: int) -> bool:
    return _sum_bytes(unit) <= flat_limit or any(spec.dtype == torch.float8_e4m3fn for spec in unit)


def _wide_first(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(sorted(specs, key=lambda spec: -spec.dtype.itemsize))


def _sum_bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(map(num_bytes, specs))


def _fill(units: Iterable[Sequence[TensorSpec]], bucket_bytes: int) -> Iterator[tuple[TensorSpec, ...]]:
    open_bucket: list[TensorSpec] = []
    room = bucket_bytes
    for unit in units:
        size = _sum_bytes(unit)
        if open_bucket and size > room:
            yield tuple(open_bucket)
            open_bucket = []
            room = bucket_bytes
        open_bucket.extend(unit)
        room -= size
    if open_bucket:
        yield tuple(open_bucket)
