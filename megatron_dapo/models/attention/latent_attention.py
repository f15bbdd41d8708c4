"""Multi-head latent attention (MLA) in Megatron's attention: queries, keys, values, their weights.

Megatron-core's own class makes tables of angles on a GPU, even on a machine without one. It also
reads the offsets of segments back to the host in every layer (rotary.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import Attention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dapo.huggingface.latent import LatentAttention
from megatron_dapo.models.attention.rotary import Rotary
from megatron_dapo.models.layers import PackedAttention, RMSNorm, mark


class _ReplicatedLinear(torch.nn.Module):
    """A product with the whole weight on each tensor-parallel rank, over the rank's own tokens."""

    def __init__(self, config: TransformerConfig, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_outputs, num_inputs, dtype=config.params_dtype))
        if config.perform_initialization:
            assert config.init_method is not None, "Megatron's config makes one"
            config.init_method(self.weight)
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return (output, no bias), as Megatron's layers do."""
        return F.linear(x, self.weight), None


@dataclass
class _LatentSubmodules(SelfAttentionSubmodules):
    """linear_qkv: the maker of a column-parallel product. latent: the sizes."""

    latent: LatentAttention | None = None


class LatentSelfAttention(Attention):
    """Megatron's attention, with DeepSeek-V2's queries, keys and values (arXiv 2405.04434, section
    2.1).

    A token's two vectors and its rotated keys are one product of the hidden states. Each
    tensor-parallel rank computes it for its own tokens; the products after it are cut by heads.

    Here the rotated dimensions come first in a head. `layers.PackedAttention` rotates them, or
    Megatron does before Transformer Engine's attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: _LatentSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        **options: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", **options)
        assert submodules.latent is not None
        self.latent = latent = submodules.latent
        heads = config.num_attention_heads

        def column_parallel(num_inputs: int, num_outputs: int) -> torch.nn.Module:
            return submodules.linear_qkv(
                num_inputs,
                num_outputs,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name="qkv",
                tp_group=self.pg_collection.tp,
            )

        self.linear_down = _ReplicatedLinear(config, config.hidden_size, latent.down_width)
        self.q_layernorm = RMSNorm(config, latent.q_rank, config.layernorm_epsilon) if latent.q_rank else None
        self.k_layernorm = None  # Megatron looks for it
        self.kv_layernorm = RMSNorm(config, latent.kv_rank, config.layernorm_epsilon)
        self.linear_q = column_parallel(latent.q_rank or config.hidden_size, heads * latent.key_dim)
        self.linear_kv = column_parallel(latent.kv_rank, heads * (latent.plain_dim + latent.value_dim))

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [S, B, this rank's heads, dim] each, not rotated yet."""
        latent = self.latent
        down, _ = self.linear_down(hidden_states)
        q_latent, kv_latent, rotated_key = down.split([latent.q_rank or 0, latent.kv_rank, latent.rotary_dim], dim=-1)
        query, _ = self.linear_q(hidden_states if self.q_layernorm is None else self.q_layernorm(q_latent))
        key_value, _ = self.linear_kv(self.kv_layernorm(kv_latent))
        query = query.unflatten(-1, (-1, latent.key_dim))
        key_value = key_value.unflatten(-1, (-1, latent.plain_dim + latent.value_dim))
        plain_key, value = key_value.split([latent.plain_dim, latent.value_dim], dim=-1)
        rotated_key = self._of_all_tokens(rotated_key)[:, :, None].expand(-1, -1, plain_key.size(2), -1)
        if not isinstance(self.core_attention, PackedAttention):
            value = value.contiguous()  # Transformer Engine takes no strides of a wider tensor
        return query, torch.cat([rotated_key, plain_key], dim=-1), value

    def _of_all_tokens(self, rotated_key: Tensor) -> Tensor:
        """Return the rotated keys of all tokens.

        Backward sums the gradients of all tensor-parallel ranks' heads.
        """
        if self.pg_collection.tp.size() == 1:
            return rotated_key
        assert self.config.sequence_parallel, "models with experts need it"
        return gather_from_sequence_parallel_region(rotated_key, group=self.pg_collection.tp)


def suits_transformer_engine(latent: LatentAttention) -> bool:
    """Return whether Transformer Engine's attention can train keys and values of these widths here.

    Then values are not padded to the width of keys. On Hopper and Blackwell of data centers, cuDNN
    has a kernel for DeepSeek's widths, 192 and 128, and for narrower ones. Source: TE 2.18,
    common/fused_attn/fused_attn.cpp, and its attention's utils.py for compute capability 12.
    """
    widths = latent.key_dim, latent.value_dim
    is_known = widths == (192, 128) or (max(widths) <= 128 and all(width % 8 == 0 for width in widths))
    return is_known and (9, 0) <= torch.cuda.get_device_capability() < (12, 0)


def put_latent_attention(layer: ModuleSpec, latent: LatentAttention, rotary: Rotary | None) -> None:
    """Replace a layer's attention; the norm before it must be separate from its products.

    rotary: of our core attention; None if Megatron rotates and Transformer Engine attends.
    """
    attention = layer.submodules.self_attention
    attention.module = LatentSelfAttention
    attention.submodules = _LatentSubmodules(
        linear_qkv=attention.submodules.linear_qkv,
        core_attention=(
            ModuleSpec(PackedAttention, params={"rotary": rotary})
            if rotary is not None
            else ModuleSpec(
                TEDotProductAttention, params={"k_channels": latent.key_dim, "v_channels": latent.value_dim}
            )
        ),
        linear_proj=attention.submodules.linear_proj,
        latent=latent,
    )
