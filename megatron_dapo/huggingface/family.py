"""The class of a family of models (`families/NAME.py`), and the families' common settings.

The settings are fields of config.json.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_dapo.huggingface.weight_rows import DECODER, Row

NeutralValues = Mapping[str, Callable[[object], bool]]
"""Fields of config.json with an effect on the computation, each with its values without effect."""

# The fields of every family. Fields without effect on training by log-probs (router_aux_loss_coef,
# output_router_logits) are not looked at.
PLAIN: NeutralValues = {
    "hidden_act": lambda value: value == "silu",
    "attention_bias": lambda value: not value,
    "mlp_bias": lambda value: not value,
    "use_sliding_window": lambda value: not value,
    "attention_dropout": lambda value: not value,
    "pretraining_tp": lambda value: value in (None, 1),
    "quantization_config": lambda value: value is None,
    "logits_soft_cap": lambda value: value is None,
    "layer_types": lambda value: (
        value is None or (isinstance(value, list) and {*map(str, value)} == {"full_attention"})
    ),
    "shared_expert_intermediate_size": lambda value: not value,
    "n_shared_experts": lambda value: not value,
}
DENSE: NeutralValues = {  # no layer has experts
    **PLAIN,
    "num_experts": lambda value: not value,
    "num_local_experts": lambda value: not value,
    "n_routed_experts": lambda value: not value,
}
MIXTURE: NeutralValues = {  # every layer has experts
    **PLAIN,
    "decoder_sparse_step": lambda value: value == 1,
    "mlp_only_layers": lambda value: not value,
}
SHARED_MIXTURE: NeutralValues = {  # experts behind dense first layers, beside a shared one
    key: is_neutral for key, is_neutral in PLAIN.items() if key not in ("attention_bias", "n_shared_experts")
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """The differences of an architecture from the plain decoder.

    The plain decoder has RMSNorm, gated SiLU, rotary embeddings and no biases.
    """

    architecture: str
    """First name in `architectures` of config.json."""

    server_class: str
    """SGLang's class, or ours of it: `module:Class`."""

    neutral: NeutralValues
    """Fields of config.json with an effect on the computation, with their values without effect.

    Other values are refused.
    """

    tool_parser: str | None = None
    """SGLang's parser of the calls that most models of the family write."""

    reasoning_parser: str | None = None
    """SGLang's parser of their thoughts; a text without thoughts stays as it is."""

    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values taken by transformers for absent fields, if other than for other families."""

    required: tuple[str, ...] = ()
    """Required fields besides those of every family."""

    rows: tuple[Row, ...] = DECODER
    """The Hugging Face tensors behind Megatron's parameters."""

    qkv_bias: bool | None = False
    """Whether query, key and value have biases; None for attention_bias of config.json."""

    qk_norm: bool | None = False
    """Whether each query and key head has an RMSNorm before the rotation; None for use_qk_norm."""

    ffn_key: str = "intermediate_size"
    """Field of config.json with the width of an MLP, or of one expert."""

    is_moe: bool = False
    """Whether layers have experts in place of MLPs, as in Qwen3-MoE."""

    has_shared_experts: bool = False
    """Whether the mixture is GLM-4.5's: dense first layers, shared experts, a router with a bias.

    The router is a sigmoid one.
    """

    is_latent: bool = False
    """Whether the attention is latent (`LatentAttention`)."""

    has_delta_net: bool = False
    """Whether most layers have a gated delta net for attention (`DeltaNet`)."""

    windows: Literal["rotated apart", "rotated alike"] | None = None
    """Whether layers with a window have rotary settings of their own; None without windows."""

    partial_rotary: bool = False
    """Whether config.json gives the rotated share of a head's dimensions."""

    needs_rope: bool = False
    """Whether rotary settings are required, because libraries differ for absent ones."""

    spec_fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda hf: {}
    """Fields of `ModelSpec` with other values than the plain decoder's, from config.json."""

    @property
    def has_stacked_experts(self) -> bool:
        """Return whether a tensor of a checkpoint is a stack of all experts' tensors of a layer."""
        return any(row.is_stacked for row in self.rows)

    @property
    def has_biased_experts(self) -> bool:
        """Return whether the products of experts have biases."""
        return any(row.of_experts and row.megatron.endswith(".bias") for row in self.rows)
