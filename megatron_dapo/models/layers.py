"""Parts of a layer that Megatron has only through Transformer Engine: RMSNorm, attention,
router."""

import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dapo.huggingface.model_spec import Activation
from megatron_dapo.models.attention.rotary import Rotary
from megatron_dapo.models.attention.segments import segments_by_length
from megatron_dapo.models.context_parallel import ContextCut


def mark(parameter: torch.nn.Parameter, **marks: bool) -> None:
    """Set Megatron's attributes of a parameter: its cut, and the ranks of its gradient's sum."""
    for name, value in marks.items():
        setattr(parameter, name, value)


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last axis, statistics in float32 as in Hugging Face's models.

    Zero-centered, it multiplies by 1 + weight before rounding to the type of x, as Gemma does.

    Megatron's own wrapper of torch.nn.RMSNorm refuses sequence parallelism. The mark on the weight
    sums its gradient over the tensor-parallel ranks, each with a part of the sequence.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **unused) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centered:
            return (self._normed(x) * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * self._normed(x).to(x.dtype)

    def _normed(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)


class ProductRoundedNorm(RMSNorm):
    """RMSNorm with one rounding to the type of x, after the product with the weight (gpt-oss)."""

    def forward(self, x: Tensor) -> Tensor:
        return (self._normed(x) * self.weight.float()).to(x.dtype)


class OutputNorm(RMSNorm):
    """Norms the output of a layer's block, attention or MLP, and adds it to the hidden states.

    It takes the place of Megatron's bias_dropout_add, with neither a bias nor dropout.
    """

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:  # type: ignore[override]
        """Return the adder, which Megatron asks for in each pass."""
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        assert bias is None and dropout == 0.0
        return residual + super().forward(output)


def norm_outputs(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Put the norm of its output behind both blocks of Megatron's layer."""
    sizes = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
    norm = ModuleSpec(OutputNorm, params=sizes)
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = norm


class PackedAttention(MegatronModule):
    """Rotary, causal attention inside each segment: Megatron's `core_attention`.

    Inputs are [S, B, heads, dim], or packed [T, heads, dim].

    Packed, on a GPU, in half precision, without sinks: torch's variable-length flash attention in
    one launch, and nothing is read back to the host. Elsewhere: one scaled_dot_product_attention
    for all segments of like length. Padding follows from a segment's own length, so the segment
    keeps the bits of a batch of its own. No token looks at the padding to its right.

    In a layer with a window, a token sees only the last tokens of its segment.

    With sinks (softmax_type learnable), each head has a number without a value, beside the scores
    in the softmax. The weights of the tokens sum up to less than 1 (gpt-oss; arXiv 2309.17453 has a
    token in its place).

    Context-parallel ranks attend from their own tokens to the gathered keys and values of all.

    Values with fewer dimensions than keys are padded with zeros: kernels have one width.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type=None,
        attention_type=None,
        softmax_scale=None,
        pg_collection=None,
        *,
        rotary: Rotary,
        local_rotary: Rotary | None = None,
        **unused,
    ):
        """rotary: of layers with full attention. local_rotary: of windows; None for the same."""
        super().__init__(config=config)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        is_local = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._rotary = local_rotary if is_local and local_rotary else rotary
        # visible tokens before a token's own; -1 for all, as in flash attention
        self._num_before = config.window_size[0] if is_local else -1
        self._context_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            self._tp_group = pg_collection.tp

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Describe the sinks, cut by heads, as Megatron's own attention does."""
        if self.softmax_offset is None:
            return {}
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self._tp_group, "dp_cp_group": ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type=None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [S, B, heads * dim], or [T, heads * dim] if packed.

        The only mask is the causal one: padding lies to the right, out of every query's sight.
        """
        assert attention_bias is None and attention_mask is None
        width = value.size(-1)
        missing = key.size(-1) - width
        if missing == 0:
            return self._attend(query, key, value, packed_seq_params)
        attended = self._attend(query, key, F.pad(value, (0, missing)), packed_seq_params)
        return attended.unflatten(-1, (-1, key.size(-1)))[..., :width].flatten(-2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
        offsets = packed_seq_params.cu_seqlens_q if packed_seq_params else None
        if self._context_group is not None:
            assert offsets is not None, "context parallelism cuts packed segments"
            return self._from_own_tokens(query, key, value, offsets, self._context_group)
        query, key = self._rotary(query, key, offsets)
        if packed_seq_params is None:
            s, b = query.shape[:2]
            return (
                self._causal(*(t.permute(1, 2, 0, 3) for t in (query, key, value)))
                .permute(2, 0, 1, 3)
                .reshape(s, b, -1)
            )
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        if query.device.type != "cpu" and is_half and self.softmax_offset is None:
            return self._varlen(query, key, value, packed_seq_params).flatten(1)
        segments = segments_by_length(tuple(packed_seq_params.cu_seqlens_q.tolist()), query.device, padded=True)
        batches = [segments.batches(t.index_select(0, segments.order)) for t in (query, key, value)]
        attended = [
            self._causal(*(t.transpose(1, 2) for t in batch)).transpose(1, 2).flatten(0, 1)
            for batch in zip(*batches, strict=True)
        ]
        return torch.cat(attended).index_select(0, segments.inverse).flatten(1)

    def _from_own_tokens(
        self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, group: ProcessGroup
    ) -> Tensor:
        """Return [T / CP, heads * dim] of this rank's tokens (`models.context_parallel`).

        In each segment they are two chunks; a chunk attends to all keys up to its own end.
        """
        rank, size = group.rank(), group.size()
        bounds = tuple(offsets.tolist())
        cut = ContextCut.make(tuple(end - start for start, end in pairwise(bounds)), group, query.device)
        query, key = self._rotary(query, key, offsets, cut.on_device)
        # backward: each rank's gradients of all keys and values are summed, and scattered
        both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=1), group=group)
        segments = segments_by_length(bounds, query.device)
        keys, values = both.index_select(0, cut.order[segments.order]).chunk(2, dim=1)
        own = segments_by_length(tuple(bound // size for bound in bounds), query.device)
        attended = []
        for batch in zip(
            own.batches(query.index_select(0, own.order)), segments.batches(keys), segments.batches(values), strict=True
        ):
            q, k, v = (t.transpose(1, 2) for t in batch)
            chunk = k.size(2) // (2 * size)
            ends = (chunk * (rank + 1), chunk * (2 * size - rank))
            chunks = [
                self._causal(part, k[:, :, :end], v[:, :, :end]) for part, end in zip(q.chunk(2, 2), ends, strict=True)
            ]
            attended.append(torch.cat(chunks, dim=2).transpose(1, 2).flatten(0, 1))
        return torch.cat(attended).index_select(0, own.inverse).flatten(1)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally, the last query to all keys, or to those of its window.

        [B, heads, S, dim] each; keys and values may have fewer heads.
        """
        grouped = query.size(1) != key.size(1)
        mask = None
        has_window = 0 <= self._num_before < key.size(2) - 1
        if has_window or query.size(2) != key.size(2):
            last = key.size(2) - query.size(2)
            mask = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril(last)
            mask = mask.triu(last - self._num_before) if has_window else mask
        if self.softmax_offset is not None:
            query, key, value, mask = self._with_sink(query, key, value, self.softmax_offset, mask)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=grouped
        )

    def _with_sink(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same with one more key before all others, visible to all queries, of value 0.

        Two more dimensions make its product with a query the head's sink, and leave the other
        products as they were. With a single one, half precision would round the sink, divided by
        the scale, a second time.
        """
        if mask is None:
            mask = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
        divided = sinks.float() / self.softmax_scale
        rounded = divided.to(query.dtype)
        both = torch.stack([rounded, (divided - rounded).to(query.dtype)], dim=-1)
        query = torch.cat([query, both[None, :, None].expand(*query.shape[:3], 2)], dim=-1)
        key = F.pad(key, (0, 2, 1, 0))
        key[:, :, 0, -2:] = 1.0
        return query, key, F.pad(value, (0, 0, 1, 0)), F.pad(mask, (1, 0), value=True)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 lacks this argument, and takes fewer heads of keys and values without it
        asked = _has_parameter(varlen_attn, "enable_gqa")
        grouped: dict[str, Any] = {"enable_gqa": query.size(1) != key.size(1)} if asked else {}
        attended = varlen_attn(
            query,
            key,
            value,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            scale=self.softmax_scale,
            window_size=(self._num_before, 0),
            **grouped,
        )
        assert isinstance(attended, Tensor), "auxiliary outputs were not asked for"
        return attended


@cache
def _has_parameter(function: Callable, name: str) -> bool:
    return name in inspect.signature(function).parameters


class Router(TopKRouter):
    """Chooses the experts of a token and their weights.

    Logits are in the model's type or in float32 (`moe_router_dtype`), scores and weights in
    float32. Hugging Face and the servers compute them so: tokens between two experts fall alike.
    Megatron's own logits need Transformer Engine (megatron-core 0.16.1).

    A sigmoid router's bias for the choice is a parameter without gradient, in Megatron a buffer. So
    it is loaded, sent and saved as any other weight, and stays constant.

    on_routed: called with each choice, [rows, experts] bool.
    """

    on_routed: Callable[[Tensor], None] | None = None

    def __init__(self, config, **options) -> None:
        super().__init__(config=config, **options)
        if config.moe_router_score_function == "sigmoid":
            bias = torch.zeros(config.num_moe_experts, dtype=torch.float32, device=self.weight.device)
            self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)

    def _apply(self, fn, recurse: bool = True) -> "Router":
        """Move it, and convert all but the bias.

        Megatron's wrapper for half precision would round the bias.
        """
        bias = self.expert_bias.detach() if self.expert_bias is not None else None
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias.data = bias.to(self.expert_bias.device)
        return self

    def gating(self, input: Tensor) -> Tensor:
        if self.config.moe_router_dtype == "fp32":
            return F.linear(input.float(), self.weight.float())
        return F.linear(input, self.weight, self.bias).float()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs, routing_map = super().routing(logits, padding_mask)
        if self.on_routed is not None:
            self.on_routed(routing_map)
        return probs, routing_map


def submodules_of(spec: ModuleSpec | partial) -> Any:
    """Return the parts of an MLP or a mixture.

    Megatron-core 0.16 has them in a ModuleSpec, 0.19 in a partial.
    """
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def gelu_tanh(x: Tensor) -> Tensor:
    """Return Gemma's GELU, with a tanh for the error function."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), gpt-oss's approximation of GELU (arXiv 1606.08415, section 2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}


class TwoRopesAttention(SelfAttention):
    """Megatron's attention with Transformer Engine, and rotary frequencies of their own for
    windows.

    The model hands angles of both kinds to all layers: Megatron doubles them, [global, local,
    global, local].
    """

    def forward(self, *arguments: Any, rotary_pos_emb: Tensor, **options: Any) -> Any:
        config = self.config
        is_local = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        own = angles_of(rotary_pos_emb, is_local)
        return super().forward(*arguments, rotary_pos_emb=own, **options)


def angles_of(angles: Tensor, is_local: bool) -> Tensor:
    """Return the angles of one kind of layers, [..., dim], from both kinds' [..., 2 dim]."""
    return angles.unflatten(-1, (2, 2, -1))[..., :, int(is_local), :].flatten(-2)


class _BiasedExpertOutput(RowParallelLinear):
    """The last product of an expert with a bias.

    Megatron adds the bias to the product in place. Autograd forbids this after a custom function
    returned its input unchanged, as the sum over one rank does.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


def local_layer_spec(
    qk_norm: bool,
    num_experts: int | None,
    rotary: Rotary,
    local_rotary: Rotary | None = None,
    *,
    linear_biases: bool = False,
    norm: type[RMSNorm] = RMSNorm,
) -> ModuleSpec:
    """Return Megatron's layer without Transformer Engine, with the parts above in their places.

    The attention rotates by itself: the model around it has no position embeddings.

    Args:
        num_experts: None for a dense layer.
        local_rotary: of layers with a window; None for `rotary`.
        linear_biases: experts have biases.
        norm: of both blocks' inputs.
    """
    spec = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=qk_norm, normalization="RMSNorm")
    layer = spec.submodules
    if num_experts:
        submodules_of(layer.mlp).router = Router
        if linear_biases:
            submodules_of(submodules_of(layer.mlp).experts).linear_fc2 = _BiasedExpertOutput
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    attention = layer.self_attention.submodules
    attention.core_attention = ModuleSpec(PackedAttention, params={"rotary": rotary, "local_rotary": local_rotary})
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
