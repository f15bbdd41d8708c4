"""This pipeline stage's weights as full Hugging Face tensors: for the servers, and for a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.safetensors_files import TensorSpec
from megatron_dapo.models.weight_map import EMBEDDING, LM_HEAD, Entry, weight_entries
from megatron_dapo.platform import ParallelLayout


@dataclass(frozen=True)
class _Slot:
    entry: Entry
    part: int  # which of the entry's HF tensors
    local_shape: tuple[int, ...]


class WeightSource:
    """specs(): the tensors of this stage, the same on all its tensor-parallel ranks. gather(): their values.

    value: what is gathered of each parameter, of its shape (the weights themselves; or their gradients).
    """

    def __init__(
        self,
        model: ModelParts,
        layout: ParallelLayout,
        value: Callable[[torch.nn.Parameter], Tensor] = torch.nn.Parameter.detach,
    ) -> None:
        self._model, self._layout, self._value = model, layout, value
        self._slots: dict[str, _Slot] = {}
        self._specs: list[TensorSpec] = []
        for entry in weight_entries(model.chunks, model.spec):
            if entry.is_copy:
                continue
            for part, local in enumerate(entry.transform.split(entry.parameter.detach(), model.spec)):
                name = entry.hf_names[part]
                self._slots[name] = _Slot(entry, part, tuple(local.shape))
                self._specs.append(TensorSpec(name, self._full_shape(entry, tuple(local.shape), name), local.dtype))

    def _full_shape(self, entry: Entry, local: tuple[int, ...], name: str) -> tuple[int, ...]:
        shape = list(local)
        if entry.transform.dim is not None:
            shape[entry.transform.dim] *= self._layout.tp
        if name in (EMBEDDING, LM_HEAD):
            shape[0] = self._model.spec.vocab_size  # without the padding
        return tuple(shape)

    def specs(self) -> list[TensorSpec]:
        return list(self._specs)

    @torch.no_grad()
    def gather(self, specs: list[TensorSpec]) -> list[Tensor] | None:
        """Full tensors on tensor-parallel rank 0, None on the others. Collective over the tensor-parallel group.

        All local slices travel in one flat all-gather; replicated tensors do not travel.
        """
        slots = [self._slots[spec.name] for spec in specs]
        split = {id(slot.entry): self._split(slot.entry) for slot in slots}  # q, k and v come from one parameter
        local = [split[id(slot.entry)][slot.part] for slot in slots]
        if self._layout.tp == 1:
            return [tensor[: spec.shape[0]] for tensor, spec in zip(local, specs, strict=True)]
        cut = [i for i, slot in enumerate(slots) if slot.entry.transform.dim is not None]
        ranks = self._exchange([local[i] for i in cut])
        if self._layout.tp_rank != 0:
            return None
        full = dict(enumerate(local))
        for i, slices in zip(cut, ranks, strict=True):
            full[i] = torch.cat(slices, dim=slots[i].entry.transform.dim)[: specs[i].shape[0]]
        return [full[i] for i in range(len(specs))]

    def _split(self, entry: Entry) -> list[Tensor]:
        return entry.transform.split(self._value(entry.parameter), self._model.spec)

    def _exchange(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """For each tensor its slices on all ranks, in rank order."""
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        gathered = flat.new_empty((self._layout.tp, flat.numel()))
        dist.all_gather_into_tensor(gathered.view(-1), flat, group=self._layout.tp_group)
        by_rank = [row.split([tensor.numel() for tensor in tensors]) for row in gathered]
        return [
            [by_rank[rank][i].view(tensor.shape) for rank in range(self._layout.tp)] for i, tensor in enumerate(tensors)
        ]
