"""Low-rank adapters (LoRA, arXiv 2106.09685) beside Megatron's frozen parallel linear layers.

Every Hugging Face module has an adapter of its own, as PEFT expects. So Megatron's layer of several
modules (q, k and v; gate and up) has several adapters. They add B (A x) x alpha / rank to a layer's
output.

Tensor-parallel ranks cut an adapter as its layer. Column-parallel, by rows of the weight: a rank
has its rows of B and all of A. Row-parallel, by columns: its columns of A and all of B. Uncut: all
of both. So only `rank` numbers per token travel.

Servers and exports get W + alpha / rank x B A, computed tensor by tensor on its way. The weight W
itself stays as it was read.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor

from megatron_dapo.huggingface.lora_settings import LoraSettings
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import hf_tensors
from megatron_dapo.models.chunk import ModelChunk
from megatron_dapo.models.layers import mark
from megatron_dapo.models.weight_map import ADAPTERS, SAME, Entry, split_blocks, weight_entries
from megatron_dapo.platform.parallel import ParallelLayout

PEFT_PREFIX = "base_model.model."


def _adapter_names(weight_name: str) -> tuple[str, str]:
    """Return the names of A and B, as in a PEFT file, for the module with this weight."""
    module = PEFT_PREFIX + weight_name.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapter_tensors(spec: ModelSpec, lora: LoraSettings) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of the model's PEFT file, in the order of the model."""
    tensors: dict[str, tuple[int, ...]] = {}
    for weight_name, shape in hf_tensors(spec).items():
        if lora.is_target(weight_name):
            name_a, name_b = _adapter_names(weight_name)
            tensors |= {name_a: (lora.rank, shape[1]), name_b: (shape[0], lora.rank)}
    return tensors


class LinearAdapter(torch.nn.Module):
    """The adapters of one linear layer.

    Its parameters are this rank's part of A [rank, in] and B [out, rank] of each targeted Hugging
    Face module. All belong to this module itself, for Megatron gathers parameters module by module.

    entry: of the layer's weight. is_on: whether the layer's output gets anything.
    """

    def __init__(self, entry: Entry, spec: ModelSpec, layout: ParallelLayout, lora: LoraSettings) -> None:
        super().__init__()
        self.entry = entry
        self.is_on = True
        self._spec = spec
        self._layout = layout
        self._place, self._num_places = layout.place(of_expert=entry.expert is not None)
        self._cut = entry.cut if entry.expert is None or layout.etp > 1 else None
        self._scale = lora.scale
        self._rank = lora.rank
        self._out_sizes: list[int] = []
        self._targets: list[int] = []  # indices of the entry's Hugging Face modules
        for index, part in enumerate(entry.transform.split(entry.parameter.detach(), spec)):
            self._out_sizes.append(part.size(0))
            if lora.is_target(entry.hf_names[index]):
                self._targets.append(index)
                self._add_pair(index, part, lora)

    def _add_pair(self, index: int, weight: Tensor, lora: LoraSettings) -> None:
        """Make A and B of one module: A as PEFT draws it, the same at every layout, B zero.

        weight: this rank's.
        """
        cut = self._cut
        whole_in = weight.size(1) * (self._num_places if cut == 1 else 1)
        name_a, _ = _adapter_names(self.entry.hf_names[index])
        generator = torch.Generator().manual_seed(lora.seed + zlib.crc32(name_a.encode()))
        bound = whole_in**-0.5  # kaiming_uniform_(a=sqrt(5))
        drawn = torch.empty(lora.rank, whole_in).uniform_(-bound, bound, generator=generator)
        own = drawn.chunk(self._num_places, dim=1)[self._place] if cut == 1 else drawn
        pair = own.to(weight), weight.new_zeros(weight.size(0), lora.rank)
        for kind, values in zip("AB", pair, strict=True):
            parameter = torch.nn.Parameter(values.contiguous())
            self.register_parameter(f"{kind}{index}", parameter)
            self._mark(parameter, cut_dim=cut if (cut, kind) in ((0, "B"), (1, "A")) else None)

    def _mark(self, parameter: torch.nn.Parameter, cut_dim: int | None) -> None:
        """Tell Megatron a parameter's cut and the ranks of its gradient's sum.

        A parameter whole on every tensor-parallel rank sees, with sequence parallelism, only a part
        of the tokens. Without it, all ranks compute the same gradient, because the backward pass
        sums the cut half's part. For an expert it is summed there, too (`_half`), and counts once
        in the norm.
        """
        if self.entry.expert is not None:  # as `build._mark_experts` for the experts
            is_counted = cut_dim is not None or self._place == 0 or self._cut is None
            mark(parameter, allreduce=False, tensor_model_parallel=True, shared=not is_counted)
        elif cut_dim is None:
            mark(parameter, sequence_parallel=self._layout.sp)
        else:
            set_tensor_model_parallel_attributes(parameter, True, cut_dim, 1)

    def pair(self, index: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        """Return A and B of one of the entry's modules."""
        return getattr(self, f"A{index}"), getattr(self, f"B{index}")

    def forward(self, x: Tensor) -> Tensor:
        """Return the addition to the layer's output. x: the layer's input on this rank."""
        low = F.linear(x, torch.cat([self._half("A", index) for index in self._targets])) * self._scale
        return F.linear(self._shared(low), self._joined_b())

    def _half(self, kind: str, index: int) -> Tensor:
        """Return A or B of a module for its product.

        The ranks of a cut expert have the same tokens. Megatron sums their outputs, and their
        gradients of the inputs. So the whole half stands beside a part of the other, and its
        gradient is summed here.
        """
        parameter = getattr(self, f"{kind}{index}")
        if self.entry.expert is None or (self._cut, kind) not in ((0, "A"), (1, "B")):
            return parameter
        return copy_to_tensor_model_parallel_region(parameter, group=self._layout.etp_group)

    def _shared(self, low: Tensor) -> Tensor:
        """Return A x as B needs it on this tensor-parallel rank."""
        layout = self._layout
        cut = self._cut
        if layout.tp == 1 or self.entry.expert is not None or cut is None:
            return low
        group = layout.tp_group
        if cut == 0:  # all tokens; backward sums the gradients of all ranks' rows of B
            if layout.sp:
                return gather_from_sequence_parallel_region(low, group=group)
            return copy_to_tensor_model_parallel_region(low, group=group)
        if layout.sp:
            return reduce_scatter_to_sequence_parallel_region(low, group=group)
        return reduce_from_tensor_model_parallel_region(low, group=group)

    def _joined_b(self) -> Tensor:
        """Return all B as one matrix, its rows in the order of the layer's own.

        A row has zeros for the A of the other modules.
        """
        width = len(self._targets) * self._rank
        blocks = []
        for index, size in enumerate(self._out_sizes):
            if index in self._targets:
                left = self._targets.index(index) * self._rank
                blocks.append(F.pad(self._half("B", index), (left, width - left - self._rank)))
            else:
                blocks.append(self.entry.parameter.new_zeros(size, width))
        return self.entry.transform.join(blocks, self._spec)

    def add_to(self, linear: torch.nn.Module, inputs: tuple, output: tuple) -> tuple:
        """Add to a layer's output, as its forward hook. Megatron's layers return (output, bias)."""
        if not self.is_on:
            return output
        return (output[0] + self(inputs[0]), *output[1:])

    def merged(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return W + alpha / rank x B A of each module, rounded once.

        parts: this rank's W; they stay as they are.
        """
        merged = list(parts)
        for index in self._targets:
            a, b = (values.detach().float() for values in self.pair(index))
            weight = parts[index]
            total = torch.addmm(weight.float(), b, a, alpha=self._scale).to(weight.dtype)
            merged[index] = torch.where(total == weight, weight, total)  # a zero keeps its sign
        return merged

    def entries(self) -> Iterator[Entry]:
        """Yield the parameters with PEFT's names, cut as they are."""
        for index in self._targets:
            name_a, name_b = _adapter_names(self.entry.hf_names[index])
            a, b = self.pair(index)
            yield self._half_entry(a, name_a, 1, ())
            yield self._half_entry(b, name_b, 0, self.entry.blocks[index])

    def _half_entry(self, parameter: torch.nn.Parameter, name: str, cut: int, blocks: tuple[int, ...]) -> Entry:
        """Return the entry of A or B. cut, blocks: as of a layer cut along this axis.

        For another layer the half is whole.
        """
        is_cut = cut == self._cut
        return Entry(
            parameter,
            (name,),
            SAME,
            cut if is_cut else None,
            (blocks if is_cut else (),),
            expert=self.entry.expert,
            num_local_experts=self.entry.num_local_experts,
        )


class _ChunkAdapters(torch.nn.ModuleList):
    """The adapters of one model chunk."""

    def __init__(self, adapters: Sequence[LinearAdapter], layout: ParallelLayout) -> None:
        super().__init__(adapters)
        self._entries = [entry for adapter in adapters for entry in adapter.entries()]
        self._layout = layout

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Describe every parameter as Megatron's modules do: under PEFT's name, a part of the
        whole."""
        described = {}
        for entry in self._entries:
            (name,) = entry.hf_names
            key = f"{ADAPTERS}{name.removeprefix(PEFT_PREFIX)}"
            if not entry.blocks[0]:
                described[key] = self._describe(entry, key, entry.parameter)
            else:
                described[key] = ShardedTensorFactory(
                    key, entry.parameter, partial(self._describe_blocks, entry), lambda parts: parts
                )
        return described

    def _describe(self, entry: Entry, key: str, values: Tensor) -> ShardedTensor:
        place, num_places = self._layout.place(of_expert=entry.expert is not None)
        offsets = [] if entry.cut is None else [(entry.cut, place, num_places)]
        copy = place if entry.cut is None else 0  # one copy per place
        return ShardedTensor.from_rank_offsets(key, values, *offsets, replica_id=(copy, 0, 0))

    def _describe_blocks(
        self, entry: Entry, key: str, values: Tensor, replica: object, flattened: object
    ) -> list[ShardedTensor]:
        """Return the blocks of a tensor under names of their own: a rank has a part of each."""
        _, num_places = self._layout.place(of_expert=entry.expert is not None)
        blocks = split_blocks(values, entry.blocks[0], num_places)
        return [self._describe(entry, f"{key}.{number}", block) for number, block in enumerate(blocks)]


def add_adapters(chunk: ModelChunk, spec: ModelSpec, layout: ParallelLayout, lora: LoraSettings) -> None:
    """Freeze a chunk's weights, and put an adapter beside every linear layer with a target."""
    chunk.requires_grad_(False)
    owners = {id(p): module for module in chunk.modules() for p in module.parameters(recurse=False)}
    adapters = []
    for entry in weight_entries([chunk], spec):
        if any(map(lora.is_target, entry.hf_names)):
            adapter = LinearAdapter(entry, spec, layout, lora)
            owners[id(entry.parameter)].register_forward_hook(adapter.add_to)
            adapters.append(adapter)
    chunk.adapters = _ChunkAdapters(adapters, layout)
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(embedding: torch.nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    """Have the first layer's input ask for a gradient, as if all weights were trained.

    Otherwise a recomputed layer, and a stage without layers, send none backward.
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output


def adapters_of(chunks: Sequence[ModelChunk]) -> list[LinearAdapter]:
    """Return the adapters of a rank's chunks; none if the whole model is trained."""
    return [adapter for chunk in chunks for adapter in getattr(chunk, "adapters", ())]


@contextmanager
def without_adapters(chunks: Sequence[ModelChunk]) -> Iterator[None]:
    """Have the chunks compute without adapters inside the block."""
    adapters = adapters_of(chunks)
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True
