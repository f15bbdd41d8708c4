"""This rank's rectangles of the whole tensors: of the model, and of the optimizer's share of it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from megatron_dapo.models.build import ModelParts
from megatron_dapo.platform.parallel import ParallelLayout

# one name per layer, and separate names for gate and up projection: no rank ever holds two parts of
# one tensor
CONTENT = {"singleton_local_shards": True, "non_homogeneous_layers": True}


@dataclass(frozen=True, eq=False)
class TensorSlice:
    """A rectangle of the tensor `name`, with its values."""

    name: str
    whole_shape: tuple[int, ...]
    """Of the tensor."""
    offset: tuple[int, ...]
    """Of the rectangle's first element."""
    values: Tensor
    is_written: bool
    """Whether this rank, of all with these values, writes them."""


@dataclass(frozen=True)
class Region:
    """A rectangle of the tensor `name`: elements [start, start + numel) of this rank's
    parameter."""

    name: str
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    replica: tuple[int, int]
    """(copy of a tied weight, tensor-parallel replica); the rank with zeros writes."""

    def slices(self, values: Tensor, first: int, replica: int, prefix: str = "") -> Iterator[TensorSlice]:
        """Yield this region's stored slices.

        Args:
            values: flat and contiguous, the parameter's elements from `first` on; the slices are
                views of it.
            first: element of the parameter.
            replica: index among the ranks with the same values; the one with 0 writes.
            prefix: of the stored tensor's name.
        """
        begin = max(first, self.start)
        end = min(first + values.numel(), self.start + math.prod(self.shape))
        for offset, shape in rectangles(self.shape, begin - self.start, end - self.start):
            part = values[begin - first : begin - first + math.prod(shape)].view(shape)
            begin += part.numel()
            yield TensorSlice(
                name=prefix + self.name,
                whole_shape=self.whole_shape,
                offset=tuple(a + b for a, b in zip(self.offset, offset, strict=True)),
                values=part,
                is_written=(*self.replica, replica) == (0, 0, 0),
            )


def rectangles(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield elements [start, end) of a row-major tensor as (offset, shape) of rectangles, in order.

    For a matrix these are at most three: the rest of a row, whole rows and the beginning of one.
    """
    if start >= end:
        return
    row_size = math.prod(shape[1:])
    row = start // row_size
    whole_rows = (end - row * row_size) // row_size
    if len(shape) == 1 or (start == row * row_size and whole_rows):
        yield (row, *[0] * (len(shape) - 1)), (whole_rows, *shape[1:])
        start = (row + whole_rows) * row_size
    else:
        end_here = min(end, (row + 1) * row_size)
        for offset, size in rectangles(shape[1:], start - row * row_size, end_here - row * row_size):
            yield (row, *offset), (1, *size)
        start = end_here
    yield from rectangles(shape, start, end)


def model_regions(model: ModelParts, layout: ParallelLayout) -> dict[torch.nn.Parameter, list[Region]]:
    """Return the regions of every parameter of this rank, in the order of the model.

    They come from Megatron, without the vocabulary's padding, so that shapes are the same for every
    number of tensor-parallel ranks.
    """
    regions: dict[torch.nn.Parameter, list[Region]] = {}
    for chunk in model.chunks:
        described = chunk.sharded_state_dict(metadata={**CONTENT, "dp_cp_group": layout.copies_group})
        for shard in described.values():
            if isinstance(shard, ShardedTensor | ShardedTensorFactory):
                # else: a module's state beside its parameters
                shards = [shard] if isinstance(shard, ShardedTensor) else shard.build()
                cut = [_region(each, shard.data, model.spec.vocab_size) for each in shards]
                regions[shard.data] = [region for region in cut if region is not None]
        missing = [name for name, parameter in chunk.named_parameters() if parameter not in regions]
        assert not missing, f"Megatron describes no shard of {missing}"
    return regions


def _region(shard: ShardedTensor, parameter: torch.nn.Parameter, vocab_size: int) -> Region | None:
    """Return a shard's region without padding, or None for padding only."""
    shape = tuple(shard.local_shape)
    whole_shape = tuple(shard.global_shape)
    # Megatron marks tensors as long as the padded vocabulary, and a critic's head, which it
    # mistakes for one
    if shard.allow_shape_mismatch and whole_shape[0] > vocab_size:
        shape = (min(shape[0], vocab_size - shard.global_offset[0]), *shape[1:])
        whole_shape = (vocab_size, *whole_shape[1:])
    if shape[0] <= 0:
        return None
    start = shard.data.storage_offset() - parameter.data.storage_offset()
    copy, tensor_replica = shard.replica_id[:2]
    if _is_expert(parameter):
        # the tensor-parallel ranks that have the same of it are replicas; see `replica_of`
        tensor_replica = 0
    return Region(shard.key, whole_shape, tuple(shard.global_offset), shape, start, (copy, tensor_replica))


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    """Return whether the parameter belongs to one expert of a mixture: Megatron marks it."""
    return not getattr(parameter, "allreduce", True)


def replica_of(parameter: torch.nn.Parameter, number: int, layout: ParallelLayout) -> int:
    """Return this rank's index among those with the same values of a stage's parameter; the one
    with 0 writes.

    number: of the parameter, the same on all of them: they take turns at writing.
    """
    if _is_expert(parameter):
        return (layout.expert_dp_rank + number) % layout.expert_dp
    return (layout.copy_rank + number) % layout.num_copies
