"""The few facts of a Hugging Face config.json needed to build a model."""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_dapo.common.sizes import round_up
from megatron_dapo.huggingface.experts import MoEConfig
from megatron_dapo.huggingface.latent import LatentAttention
from megatron_dapo.huggingface.rope import RopeScaling
from megatron_dapo.huggingface.windows import Windows

Activation = Literal["silu", "gelu_tanh", "quick_gelu"]


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of gated delta net layers (arXiv 2412.06464): a state per head, and no keys kept.

    A key head serves several value heads.
    """

    num_key_heads: int
    """Heads of queries and keys."""
    num_value_heads: int
    """Heads of values, each with a state."""
    key_dim: int
    """Dimensions of a head of queries or keys."""
    value_dim: int
    """Dimensions of a head of values."""
    conv_size: int
    """Tokens under the convolution of queries, keys and values, the current one included."""
    state_dtype: str = "float32"
    """Type of a state on servers."""

    @property
    def values_per_key(self) -> int:
        """Return the value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def conv_channels(self) -> int:
        """Return the numbers per token under the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: everything needed to build it, independent of the parallel layout."""

    family: str  # key of FAMILIES
    num_layers: int
    hidden_size: int
    ffn_size: int  # of the MLP; in a MoE model, of one expert
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    rotary_dim: int  # the first of a head's dimensions
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rotary_interleaved: bool = False  # a pair is two neighbours, not one of each half
    output_norms: bool = False  # an RMSNorm of attention's and MLP's output
    zero_centered_norms: bool = False  # norms multiply by 1 + weight, and round thereafter
    product_rounded_norms: bool = False  # norms multiply by the weight, then round once
    embedding_scale: float = 1.0  # factor of embeddings, rounded to the model's type
    # its root divides products of query and key; None for head_dim
    attention_dim: int | None = None
    activation: Activation = "silu"  # of the gate
    glu_limit: float | None = None  # limit of gate and up, with 1 added to up (gpt-oss); or None
    # of a layer's other products than query, key, value; the router's, too
    linear_biases: bool = False
    attention_sinks: bool = False  # a number per head in its softmax, without a value
    latent: LatentAttention | None = None  # None: q, k and v come from the hidden states
    windows: Windows | None = None  # None: all layers see all tokens before them
    delta_net: DeltaNet | None = None  # None: all layers have attention
    attention_every: int = 1  # the last of so many layers has attention, the others a delta net
    attention_output_gate: bool = False  # a sigmoid of further queries multiplies attention's output
    moe: MoEConfig | None = None  # None: dense
    num_prediction_layers: int = 0  # of multi-token prediction, perhaps after the last layer
    value_head: bool = False  # a critic: one number per position, no log-probs

    def as_critic(self) -> "ModelSpec":
        """Return the same body with a value head."""
        return replace(self, tied_embeddings=False, value_head=True)

    @property
    def value_dim(self) -> int:
        """Return the dimensions of a head of values, and of an attention head's output."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def dense_ffn_size(self) -> int:
        """Return the width of the MLP of a layer without experts."""
        return self.moe.dense_ffn_size if self.moe else self.ffn_size

    @property
    def active_ffn_size(self) -> int:
        """Return the width of a token's MLPs in a layer; in a MoE model, in one with experts."""
        if self.moe is None:
            return self.ffn_size
        return self.ffn_size * self.moe.experts_per_token + self.moe.shared_ffn_size

    @property
    def num_moe_layers(self) -> int:
        """Return the number of layers with experts."""
        return self.num_layers - self.moe.num_dense_layers if self.moe else 0

    @property
    def mean_active_ffn_size(self) -> float:
        """Return the width of a token's MLPs in a layer, the mean over all layers."""
        num_dense = self.num_layers - self.num_moe_layers
        dense = num_dense * self.dense_ffn_size if num_dense else 0
        return (dense + self.num_moe_layers * self.active_ffn_size) / self.num_layers

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts."""
        return self.moe is not None and layer >= self.moe.num_dense_layers

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has attention and not a delta net."""
        return (layer + 1) % self.attention_every == 0

    @property
    def num_attention_layers(self) -> int:
        """Return the number of layers with attention."""
        return self.num_layers // self.attention_every

    def padded_vocab_size(self, tp: int) -> int:
        """Return the rows of the embedding: the vocabulary, rounded up.

        Tensor-parallel ranks have equal shares of them.
        """
        return round_up(self.vocab_size, tp)

    @property
    def num_local_layers(self) -> int:
        """Return the number of layers with a window."""
        return sum(self.windows.is_local) if self.windows else 0

    def of_local_layers(self) -> "ModelSpec | None":
        """Return the same model with the rotary settings of its local layers.

        None if all layers have the same settings.
        """
        if self.windows is None or self.windows.rope_theta is None:
            return None
        return replace(self, rope_theta=self.windows.rope_theta, rope_scaling=None)
