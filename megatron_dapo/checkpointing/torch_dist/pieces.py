"""Which boxes of the whole tensors this rank holds: of the model, and of the optimizer's slices of it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from megatron_dapo.models.build import ModelParts
from megatron_dapo.platform.parallel import ParallelLayout

# one name per layer, gate and up projection under names of their own: no rank ever holds two parts of one tensor
CONTENT = {"singleton_local_shards": True, "non_homogeneous_layers": True}


@dataclass(frozen=True)
class Box:
    """A rectangle of the whole tensor `key`, which lies in this rank's parameter as elements [start, start + numel).

    replica: (copy of a tied weight, tensor-parallel replica); the rank with zeros writes.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    replica: tuple[int, int]

    def pieces(self, values: Tensor, first: int, replica: int, prefix: str = "") -> Iterator[ShardedTensor]:
        """What is stored of it. values: flat, contiguous, the parameter's elements from `first` on; views are stored.

        replica: of the data-parallel ranks that hold the same values the one with 0 writes.
        """
        begin, end = max(first, self.start), min(first + values.numel(), self.start + math.prod(self.shape))
        for offset, shape in rectangles(self.shape, begin - self.start, end - self.start):
            data = values[begin - first : begin - first + math.prod(shape)].view(shape)
            begin += data.numel()
            yield ShardedTensor(
                key=prefix + self.key,
                data=data,
                dtype=data.dtype,
                local_shape=shape,
                global_shape=self.global_shape,
                global_offset=tuple(a + b for a, b in zip(self.offset, offset, strict=True)),
                axis_fragmentations=None,  # the pieces form no regular grid
                replica_id=(*self.replica, replica),
            )


def rectangles(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements [start, end) of a row-major tensor as (offset, shape) of boxes, in order: for a matrix at most the rest
    of a row, whole rows and the beginning of one."""
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


def model_boxes(model: ModelParts, layout: ParallelLayout) -> dict[torch.nn.Parameter, list[Box]]:
    """The boxes of every parameter of this rank, in the order of the model. Megatron knows them; padding of the
    vocabulary is cut off, so that the shapes are the same for every number of tensor-parallel ranks."""
    boxes: dict[torch.nn.Parameter, list[Box]] = {}
    for chunk in model.chunks:
        described = chunk.sharded_state_dict(metadata={**CONTENT, "dp_cp_group": layout.dp_group})
        for part in described.values():
            if isinstance(part, ShardedTensor | ShardedTensorFactory):  # else: a module's state beside its parameters
                parameter = part.data
                whole = [part] if isinstance(part, ShardedTensor) else part.build()
                boxes[parameter] = [box for box in (_box(w, parameter, model.spec.vocab_size) for w in whole) if box]
        missing = [name for name, parameter in chunk.named_parameters() if parameter not in boxes]
        assert not missing, f"Megatron describes no shard of {missing}"
    return boxes


def _box(part: ShardedTensor, parameter: torch.nn.Parameter, vocab_size: int) -> Box | None:
    """None where the part is padding only."""
    shape, global_shape = tuple(part.local_shape), tuple(part.global_shape)
    # Megatron marks what is as long as the padded vocabulary, and a critic's head, which it takes for such
    if part.allow_shape_mismatch and global_shape[0] > vocab_size:
        shape = (min(shape[0], vocab_size - part.global_offset[0]), *shape[1:])
        global_shape = (vocab_size, *global_shape[1:])
    if shape[0] <= 0:
        return None
    start = part.data.storage_offset() - parameter.data.storage_offset()
    copy, tensor_replica = part.replica_id[:2]
    if is_expert(parameter):  # whole on every rank that has it, tensor-parallel ones too; see `replica_of`
        assert shape == global_shape, f"{part.key} is cut"
        tensor_replica = 0
    return Box(part.key, global_shape, tuple(part.global_offset), shape, start, (copy, tensor_replica))


def is_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether it belongs to one expert of a mixture: Megatron's mark."""
    return not getattr(parameter, "allreduce", True)


def replica_of(parameter: torch.nn.Parameter, number: int, layout: ParallelLayout) -> int:
    """This rank's place among those that hold the same values of a stage's parameter; they take turns at writing, the
    one with 0 does. number: of the parameter, the same on all of them."""
    if is_expert(parameter):
        return (layout.expert_dp_rank + number) % layout.expert_dp
    return (layout.dp_rank + number) % layout.dp
