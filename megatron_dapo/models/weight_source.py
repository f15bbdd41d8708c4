"""This pipeline stage's weights as full Hugging Face tensors, for servers and checkpoints."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.huggingface.model_tensors import served_tensors
from megatron_dapo.huggingface.weight_rows import EMBEDDING, LM_HEAD
from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.lora import LinearAdapter, adapters_of
from megatron_dapo.models.safetensors_files import TensorSpec
from megatron_dapo.models.weight_map import Entry, weight_entries
from megatron_dapo.platform.parallel import ParallelLayout


@dataclass(frozen=True)
class _Slot:
    """The source of a tensor. A stack of experts has a slot for each expert."""

    entry: Entry
    """The parameter's entry; for another rank's expert, the entry in its place here."""
    part: int
    """Index of the tensor among the entry's HF tensors."""
    shape: tuple[int, ...]
    """Shape of the tensor, padding included."""
    owner: int | None
    """Expert-parallel rank with the tensor, if it is an expert's."""


class WeightSource:
    """The tensors of this stage, the same on all its ranks, and their values.

    Values of a model with adapters are the weights made from frozen weights and adapters.

    value: returns a tensor of a parameter's shape to gather in its place, such as its gradient.
    entries: to gather instead of the model's weights.
    """

    def __init__(
        self,
        model: ModelParts,
        layout: ParallelLayout,
        value: Callable[[torch.nn.Parameter], Tensor] | None = None,
        entries: Iterable[Entry] | None = None,
    ) -> None:
        self._model = model
        self._layout = layout
        self._value = value or torch.nn.Parameter.detach
        self._adapters: dict[torch.nn.Parameter, LinearAdapter] = {}
        if value is None:
            self._adapters = {adapter.entry.parameter: adapter for adapter in adapters_of(model.chunks)}
        # name -> number in the stack, or None -> slot
        self._slots: dict[str, dict[int | None, _Slot]] = {}
        self._specs: list[TensorSpec] = []
        self._served = served_tensors(model.spec)
        for entry in weight_entries(model.chunks, model.spec) if entries is None else entries:
            if entry.is_copy:
                continue
            local_parts = entry.transform.split(entry.parameter.detach(), model.spec)
            # experts of different ranks side by side, so that each bucket comes from all of them
            owners: Iterable[int | None] = [None] if entry.expert is None else range(layout.ep)
            for owner in owners:
                names = entry.hf_names if owner is None else entry.hf_names_on(owner)
                for part, (name, local) in enumerate(zip(names, local_parts, strict=True)):
                    self._add(entry, owner, part, name, local)

    def _add(self, entry: Entry, owner: int | None, part: int, name: str, local: Tensor) -> None:
        """Add a tensor, or an expert's part of a stack.

        local: this rank's slice of it, or of the expert in its place.
        """
        shape = self._full_shape(entry, tuple(local.shape))
        is_new = name not in self._slots
        number = entry.expert_on(owner) if entry.num_stacked and owner is not None else None
        self._slots.setdefault(name, {})[number] = _Slot(entry, part, shape, owner)
        if not is_new:
            return
        if name in (EMBEDDING, LM_HEAD):
            shape = (self._model.spec.vocab_size, *shape[1:])  # without the padding
        if entry.num_stacked:
            shape = (entry.num_stacked, *shape)
        with_previous = entry.sent_together and part > 0
        self._specs.append(TensorSpec(name, shape, local.dtype, with_previous, self._served.get(name)))

    def _full_shape(self, entry: Entry, local: tuple[int, ...]) -> tuple[int, ...]:
        shape = list(local)
        if entry.cut is not None:
            _, num_places = self._layout.place(of_expert=entry.expert is not None)
            shape[entry.cut] *= num_places
        return tuple(shape)

    def specs(self) -> list[TensorSpec]:
        """Return the stage's tensors by name, full shape and type."""
        return list(self._specs)

    @torch.no_grad()
    def gather(self, specs: list[TensorSpec]) -> list[Tensor] | None:
        """Return full tensors on the stage's source rank, None on the others.

        Collective over its gathering ranks (`layout.gathers`); for the others a call does nothing.
        All slices travel in one flat all-gather, slices of experts in another. Other ranks' experts
        then travel in one all-to-all; the rest stays in place.
        """
        layout = self._layout
        if not layout.gathers:
            return None
        slots = [slot for spec in specs for _, slot in sorted(self._slots[spec.name].items())]
        here = [i for i, slot in enumerate(slots) if slot.owner in (None, layout.ep_rank)]
        full = self._parts(slots, here)
        cut = [i for i in here if slots[i].entry.cut is not None]
        of_experts = [i for i in cut if slots[i].owner is not None]
        if layout.tp > 1 and layout.copy_rank == 0:
            self._join(slots, full, [i for i in cut if slots[i].owner is None], layout.tp_group)
        if layout.etp > 1 and layout.expert_dp_rank == 0:
            self._join(slots, full, of_experts, layout.etp_group)
        if layout.ep > 1 and layout.expert_dp_rank == 0 and layout.etp_rank == 0:
            experts = [i for i, slot in enumerate(slots) if slot.owner is not None]
            full |= self._fetch({i: slots[i] for i in experts}, full)
        if not layout.is_source:
            return None
        return self._whole(specs, [full[i] for i in range(len(slots))])

    def _parts(self, slots: list[_Slot], here: list[int]) -> dict[int, Tensor]:
        """Return this rank's parts of the slots numbered in `here`.

        q, k and v are parts of one parameter: it is split once, and its other parts are dropped.
        """
        by_parameter: dict[int, list[int]] = {}
        for i in here:
            by_parameter.setdefault(id(slots[i].entry), []).append(i)
        full: dict[int, Tensor] = {}
        for numbers in by_parameter.values():
            parts = self._split(slots[numbers[0]].entry)
            full |= {i: parts[slots[i].part] for i in numbers}
        return full

    def _whole(self, specs: list[TensorSpec], parts: list[Tensor]) -> list[Tensor]:
        """Return the full tensors from their parts: stacked, or without the padding of the
        vocabulary."""
        whole, rest = [], iter(parts)
        for spec in specs:
            of_spec = list(islice(rest, len(self._slots[spec.name])))
            whole.append(torch.stack(of_spec) if None not in self._slots[spec.name] else of_spec[0][: spec.shape[0]])
        return whole

    def _split(self, entry: Entry) -> list[Tensor]:
        parts = entry.transform.split(self._value(entry.parameter), self._model.spec)
        adapter = self._adapters.get(entry.parameter)
        return parts if adapter is None else adapter.merged(parts)

    def _fetch(self, slots: dict[int, _Slot], here: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return, on the source rank, the slots' missing tensors from the ranks that have them."""
        if not slots:
            return {}
        ep = self._layout.ep
        is_source = self._layout.is_source
        by_owner = [[i for i, slot in slots.items() if slot.owner == rank] for rank in range(ep)]
        to_send = [] if is_source else [here[i].reshape(-1) for i in by_owner[self._layout.ep_rank]]
        like = self._value(next(iter(slots.values())).entry.parameter)
        flat = torch.cat(to_send) if to_send else like.new_empty(0)
        wanted = [i for rank in range(1, ep) for i in by_owner[rank]] if is_source else []
        lengths = {i: math.prod(slots[i].shape) for i in wanted}
        counts = [sum(lengths.get(i, 0) for i in indices) for indices in by_owner]
        received = like.new_empty(sum(counts))
        to_source = [flat.numel(), *[0] * (ep - 1)]
        dist.all_to_all_single(received, flat, counts, to_source, group=self._layout.ep_group)
        parts = received.split([lengths[i] for i in wanted])
        return {i: part.view(slots[i].shape) for i, part in zip(wanted, parts, strict=True)}

    @staticmethod
    def _join(slots: list[_Slot], full: dict[int, Tensor], cut: list[int], group: dist.ProcessGroup | None) -> None:
        """Replace this rank's slices of the tensors numbered in `cut` by the whole tensors.

        Collective over the group.
        """
        assert group is not None, "the layout has the groups of its sizes"
        # of one type at a time: together they would all get the wider one
        for dtype in sorted({full[i].dtype for i in cut}, key=str):
            of_dtype = [i for i in cut if full[i].dtype == dtype]
            slices = [full[i] for i in of_dtype]
            flat = torch.cat([part.reshape(-1) for part in slices])
            gathered = flat.new_empty((group.size(), flat.numel()))
            dist.all_gather_into_tensor(gathered.view(-1), flat, group=group)
            del flat
            by_rank = [row.split([part.numel() for part in slices]) for row in gathered]
            for number, (i, part) in enumerate(zip(of_dtype, slices, strict=True)):
                full[i] = slots[i].entry.whole(slots[i].part, [parts[number].view(part.shape) for parts in by_rank])
