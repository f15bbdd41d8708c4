"""A gated delta net in the place of a layer's attention (Qwen3-Next, Qwen3.5; arXiv 2412.06464).

Megatron-core's own has neither packed segments nor CPUs (0.16.1), reads the segments' offsets back
to the host in every layer, or rounds the decay to bfloat16 (0.19.2).
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    checkpoint,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dapo.huggingface.model_spec import DeltaNet
from megatron_dapo.kernels.row_plan import to_device
from megatron_dapo.models.attention.delta_rule import Offsets, causal_conv, gated_delta_rule
from megatron_dapo.models.attention.segments import Packing
from megatron_dapo.models.context_parallel import ContextCut


class GatedNorm(torch.nn.Module):
    """weight x / rms(x) silu(gate) per head, in float32 and rounded once, as in servers.

    Tensor-parallel ranks share the weight but have heads of their own, so its gradient is summed
    over them. Megatron would do so only with sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, size: int, group: ProcessGroup) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        self._group = group

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        kind = torch.promote_types(x.dtype, torch.float32)
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self._group).to(kind)
        wide = x.to(kind)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (weight * normed * F.silu(gate.to(kind))).to(x.dtype)


@dataclass
class _DeltaSubmodules(SelfAttentionSubmodules):
    """linear_qkv, linear_proj: the makers of column- and row-parallel products. net: the sizes."""

    net: DeltaNet | None = None


class GatedDeltaNet(MegatronModule):
    """Queries, keys and values of a product, a convolution, the gated delta rule, a gated norm.

    Tensor-parallel ranks have key heads of their own, with their value heads. In the first product
    a key head's rows lie side by side: query, key, values (all three under the convolution), gates
    (z), and b and a, of which beta and the decay are made.

    Context-parallel ranks exchange tokens for heads before the convolution, and back after the
    rule: each computes whole segments of its heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: _DeltaSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        net = submodules.net
        assert net is not None
        self.net = net
        self.tp_group = pg_collection.tp
        self._context_group = pg_collection.cp if config.context_parallel_size > 1 else None
        values = net.values_per_key
        # of a key head: queries, keys and values; gates; b; a
        self._widths = [2 * net.key_dim + values * net.value_dim, values * net.value_dim, values, values]
        shared: dict[str, Any] = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        self.linear_in = submodules.linear_qkv(
            config.hidden_size,
            net.num_key_heads * sum(self._widths),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **shared,
        )
        self.linear_out = submodules.linear_proj(
            net.num_value_heads * net.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **shared,
        )
        ranks = self.tp_group.size()
        heads = net.num_value_heads // ranks
        dtype = config.params_dtype
        self.conv_weight = torch.nn.Parameter(torch.zeros(net.conv_channels // ranks, 1, net.conv_size, dtype=dtype))
        self.A_log = torch.nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.dt_bias = torch.nn.Parameter(torch.zeros(heads, dtype=dtype))
        for parameter in self.parameters(recurse=False):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.out_norm = GatedNorm(config, net.value_dim, self.tp_group)
        self._recomputes = config.recompute_granularity == "selective" and "core_attn" in (
            config.recompute_modules or []
        )

    def _apply(self, fn, recurse: bool = True) -> "GatedDeltaNet":
        """Move it, and convert all but A_log.

        Megatron's wrapper for half precision would round A_log, and with it all decays.
        """
        kept = self.A_log.detach()
        super()._apply(fn, recurse)
        self.A_log.data = kept.to(self.A_log.device)
        return self

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Describe the parameters; its own are cut by heads, along their first axis."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own = dict(self.named_parameters(recurse=False))
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        cuts = dict.fromkeys(own, 0)
        described = make_sharded_tensors_for_checkpoint(own, prefix, cuts, sharded_offsets, **groups)
        for name, module in self.named_children():
            described |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return described

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Packing | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Return ([S (/ tp), B, H], no bias). Rows that are not packed are padded at their right."""
        projected, _ = self.linear_in(hidden_states)
        length, num_rows = projected.shape[:2]
        row = projected.transpose(0, 1).flatten(0, 1).unflatten(-1, (-1, sum(self._widths)))
        mixed, gate, b, a = row.split(self._widths, dim=-1)
        offsets = _offsets(packed_seq_params, length, num_rows, row.device)
        read_states = partial(self._read_states, offsets)
        if self._recomputes and self.training:
            read = checkpoint(read_states, False, mixed, b, a)
        else:
            read = read_states(mixed, b, a)
        normed = self.out_norm(read, gate.reshape(read.shape))
        rows = normed.flatten(1).unflatten(0, (num_rows, length)).transpose(0, 1).contiguous()
        # with the strides of its shape, as the first layer's input (`ModelChunk`)
        output, _ = self.linear_out(rows.flatten(0, 1).view(length, num_rows, -1))
        return output, None

    def _read_states(self, offsets: Offsets, mixed: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """Return the tokens' readings of the states, [T, value heads, dim] of [T, key heads, ...].

        With context parallelism, T and offsets are of this rank's tokens and of the whole row.
        """
        net, group = self.net, self._context_group
        weight, a_log, dt_bias = self.conv_weight, self.A_log, self.dt_bias
        if group is not None:
            widths = tuple(end - start for start, end in pairwise(offsets.on_host))
            cut = ContextCut.make(widths, group, mixed.device)
            travelling = torch.cat([mixed, b, a], dim=-1)
            whole = all_to_all_sp2hp(travelling.flatten(1), group=group).index_select(0, cut.order)
            mixed, b, a = whole.unflatten(-1, (-1, travelling.size(-1))).split(
                [mixed.size(-1), b.size(-1), a.size(-1)], dim=-1
            )
            weight, a_log, dt_bias = (p.chunk(group.size())[group.rank()] for p in (weight, a_log, dt_bias))
        row = causal_conv(mixed.flatten(1), weight, offsets).unflatten(-1, (-1, self._widths[0]))
        query, key, value = row.split([net.key_dim, net.key_dim, self._widths[1]], dim=-1)
        value, b, a = value.reshape(row.size(0), -1, net.value_dim), b.flatten(1), a.flatten(1)
        kind = torch.promote_types(a.dtype, torch.float32)
        log_decay = -a_log.to(kind).exp() * F.softplus(a.to(kind) + dt_bias.to(kind))
        read = gated_delta_rule(query, key, value, log_decay, b.sigmoid(), offsets)
        if group is not None:
            parts = read.flatten(1).index_select(0, cut.order.argsort())
            read = all_to_all_hp2sp(parts, group=group).unflatten(-1, (-1, net.value_dim))
        return read


def _offsets(packing: Packing | None, length: int, num_rows: int, device: torch.device) -> Offsets:
    """Return the segments of a packed row, or of a rectangle's rows one after the other."""
    if packing is not None:
        return Offsets(packing.bounds, packing.cu_seqlens_q)
    return _offsets_of_rows(length, num_rows, device)


@lru_cache(maxsize=16)
def _offsets_of_rows(length: int, num_rows: int, device: torch.device) -> Offsets:
    bounds = range(0, length * num_rows + 1, length)
    return Offsets(tuple(bounds), to_device(np.array(bounds), device).int())


def put_delta_net(layer: ModuleSpec, net: DeltaNet) -> None:
    """Replace a layer's attention; the norm before it must be separate from its products."""
    attention = layer.submodules.self_attention
    layer.submodules.self_attention = ModuleSpec(
        GatedDeltaNet,
        submodules=_DeltaSubmodules(
            linear_qkv=attention.submodules.linear_qkv,
            core_attention=attention.submodules.core_attention,
            linear_proj=attention.submodules.linear_proj,
            net=net,
        ),
    )
