"""Plans for torch's distributed checkpoint: slices of tensors, and objects of single ranks."""

import io
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_dapo.checkpointing.torch_dist.generators import STORED_CLASSES
from megatron_dapo.checkpointing.torch_dist.reading import load_plain
from megatron_dapo.checkpointing.torch_dist.slices import TensorSlice


class SliceSavePlanner(DefaultSavePlanner):
    """Plans this rank's writes. torch combines the plans of all ranks: slices must fill each
    tensor, and not overlap."""

    def __init__(self, slices: Sequence[TensorSlice], objects: Mapping[str, io.BytesIO]) -> None:
        """Take this rank's slices and objects. objects: pickled already, each under a unique
        name."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._slices = slices
        self._objects = objects
        self._values = {_index(each): each.values for each in slices}

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(each) for each in self._slices]
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        return SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return self._objects[write_item.index.fqn]
        return self._values[write_item.index]


class SliceLoadPlanner(LoadPlanner):
    """Plans this rank's reads, for any cut at writing, and fills the slices in place.

    objects: the requested ones, after reading.
    """

    def __init__(self, slices: Iterable[TensorSlice], names: Collection[str]) -> None:
        """Take the slices to fill. names: the names of the objects to read."""
        self._slices: dict[str, list[TensorSlice]] = defaultdict(list)
        for each in slices:
            self._slices[each.name].append(each)
        self._names = names
        self._stored: Metadata | None = None
        self.objects: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the index of the checkpoint. state_dict: unused."""
        self._stored = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._stored is not None, "set_up_planner comes first"
        items: list[ReadItem] = []
        for name, slices in self._slices.items():
            stored = self._stored.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata), f"{name} is stored as an object"
            items += create_read_items_for_chunk_list(name, stored, [_chunk(each) for each in slices])
        return LoadPlan(items + [_object_item(name) for name in self._names])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = load_plain(value, *STORED_CLASSES)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of a slice that the item fills; `create_local_plan` numbered the slices
        of a tensor."""
        number = read_item.dest_index.index
        assert number is not None, read_item
        part = self._slices[read_item.dest_index.fqn][number].values
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: `resolve_tensor` returned the model's own memory."""


def _index(each: TensorSlice) -> MetadataIndex:
    return MetadataIndex(each.name, each.offset)


def _chunk(each: TensorSlice) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(each.offset), sizes=each.values.size())


def _write_item(each: TensorSlice) -> WriteItem:
    data = TensorWriteData(
        chunk=_chunk(each),
        properties=TensorProperties.create_from_tensor(each.values),
        size=torch.Size(each.whole_shape),
    )
    return WriteItem(_index(each), WriteItemType.SHARD, tensor_data=data)


def _object_item(name: str) -> ReadItem:
    nothing = torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), nothing, MetadataIndex(name), nothing, nothing)
