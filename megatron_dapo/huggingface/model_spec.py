"""The few facts of a Hugging Face config.json that a model is built from."""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_dapo.common.sizes import round_up
from megatron_dapo.huggingface.experts import MoEConfig
from megatron_dapo.huggingface.latent import LatentAttention
from megatron_dapo.huggingface.rope import RopeScaling
from megatron_dapo.huggingface.windows import Windows

Activation = Literal["silu", "gelu_tanh", "quick_gelu"]


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: everything that is needed to build it, independent of the parallel layout."""

    family: str  # key of FAMILIES
    num_layers: int
    hidden_size: int
    ffn_size: int  # of the MLP; in a MoE model, of one expert
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    rotary_dim: int  # the first of a head's dimensions, which are rotated
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rotary_interleaved: bool = False  # a rotated pair is two neighbours, in place of one of each half
    output_norms: bool = False  # an RMSNorm of what attention and MLP add to the hidden states
    zero_centered_norms: bool = False  # norms multiply by 1 + weight, and round to the model's type thereafter
    product_rounded_norms: bool = False  # norms round to the model's type once, when they have multiplied by the weight
    embedding_scale: float = 1.0  # what embeddings are multiplied by, rounded to the model's type
    attention_dim: int | None = None  # products of query and key are divided by its root; none = head_dim
    activation: Activation = "silu"  # of the gate
    glu_limit: float | None = None  # gate and up are clamped to it, and 1 is added to up (gpt-oss); none = as they are
    linear_biases: bool = False  # of all products of a layer besides query, key and value, the router's too
    attention_sinks: bool = False  # a number per head in the softmax of its scores, which has no value
    latent: LatentAttention | None = None  # none = queries, keys and values are products of the hidden states
    windows: Windows | None = None  # none = all layers see all tokens before them
    moe: MoEConfig | None = None  # none = dense
    num_prediction_layers: int = 0  # of multi-token prediction, which checkpoints may have behind the last layer
    value_head: bool = False  # a critic: one number per position in the place of the log-probs

    def as_critic(self) -> "ModelSpec":
        """Return the same body with a value head."""
        return replace(self, tied_embeddings=False, value_head=True)

    @property
    def value_dim(self) -> int:
        """Return the dimensions of a head of values, which is what a head of the attention answers."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def dense_ffn_size(self) -> int:
        """Return the width of the MLP of a layer without experts."""
        return self.moe.dense_ffn_size if self.moe else self.ffn_size

    @property
    def active_ffn_size(self) -> int:
        """Return the width of the MLPs that a token passes through in a layer; in a MoE model, in one with experts."""
        if self.moe is None:
            return self.ffn_size
        return self.ffn_size * self.moe.experts_per_token + self.moe.shared_ffn_size

    @property
    def num_moe_layers(self) -> int:
        """Return how many layers have experts."""
        return self.num_layers - self.moe.num_dense_layers if self.moe else 0

    @property
    def mean_active_ffn_size(self) -> float:
        """Return the width of the MLPs that a token passes through in a layer, the mean over all of them."""
        num_dense = self.num_layers - self.num_moe_layers
        dense = num_dense * self.dense_ffn_size if num_dense else 0
        return (dense + self.num_moe_layers * self.active_ffn_size) / self.num_layers

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts."""
        return self.moe is not None and layer >= self.moe.num_dense_layers

    def padded_vocab_size(self, tp: int) -> int:
        """Return the rows of the embedding: the vocabulary, rounded up to equal shares of tensor-parallel ranks."""
        return round_up(self.vocab_size, tp)

    @property
    def num_local_layers(self) -> int:
        """Return how many layers see a window alone."""
        return sum(self.windows.is_local) if self.windows else 0

    def of_local_layers(self) -> "ModelSpec | None":
        """Return the same model with the rotary settings of its local layers; none where all layers have the same."""
        if self.windows is None or self.windows.rope_theta is None:
            return None
        return replace(self, rope_theta=self.windows.rope_theta, rope_scaling=None)
