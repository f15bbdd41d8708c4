"""The families under test: one row each.

Tests of parity, conversion, layouts, adapters and servers derive their lists from these rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

Options = dict[str, Any]
"""Keyword arguments of `make_tiny`."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    """The sizes of a tiny checkpoint behind fields of its config.json."""

    hidden: int
    heads: int
    num_experts: int
    experts_per_token: int
    norm_topk_prob: bool
    layers: int


@dataclass(frozen=True)
class TinyFamily:
    """A family in tests: the recipe of its tiny checkpoint,
    and its facts known without the program."""

    config: type
    """Class of the configuration in transformers."""

    model: type
    """Class of the model in transformers. Its name is the architecture."""

    num_served: int
    """Parameters of a server of two layers, which has q, k and v in one, gate and up in one, and
    all experts in two."""

    fields: Callable[[Shape], dict] = lambda shape: {}
    """Fields of config.json besides those of all families; None: the field is left out."""

    rope: dict | None = None
    """The default block rope_parameters of tests."""

    is_mixture: bool = False
    """Whether layers have experts."""

    has_own_layers: bool = False
    """Whether its layers differ from other families',
    so that tests of layouts and rounding run over them."""

    cuts_experts: bool = True
    """Whether expert tensor parallelism is supported."""

    norm_mean: float = 1.0
    """Mean of the random weights of norms."""

    error: float | None = 1e-5
    """Largest error of a log-prob of its random checkpoint in float32; None: ROUNDINGS of
    transformers' own."""

    modules: tuple[str, ...] = (*ATTENTION, *MLP)
    """Last names of the linear modules of a layer."""

    num_adapted: Callable[[int], int] | None = None
    """Number of experts -> modules with an adapter in two layers; None: 7 in each."""

    parity: dict[str, Options] = field(default_factory=dict)
    """Name -> checkpoint compared with transformers by log-probs;
    {}: one under the family's name."""

    converted: dict[str, Options] = field(default_factory=dict)
    """Name -> checkpoint for a conversion there and back; {}: one under the family's name. bf16 in
    a name is its type, files stands for several files."""


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# With 16 dimensions a head and original_max_position_embeddings 64 some pairs are kept, some
# divided, some in between.
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA3_ROPE = {  # two kinds of rotary settings
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
HYBRID_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
# As published by Qwen3.5, whose image models have three axes of positions: on text all are the same,
# but servers take another path.
AXES_ROPE = HYBRID_ROPE | {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
ROUNDINGS = 4
"""The allowed distance of a log-prob in float32 from the exact one, in the largest rounding of
transformers' float32 on the same tokens, some hundred of them: sums in another order."""
# transformers computes delta nets in float32 at any type; in float32 it is as far off as we are.
HYBRID_ERROR = 1e-4
SHORT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
KIMI_YARN = {"rope_theta": 50000.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
LARGE_EPSILON = 1e-3  # of norms, so that another one shows


def _mixture(shape: Shape, num_experts_key: str = "num_experts") -> dict:
    return {
        num_experts_key: shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.hidden // 2,
        "norm_topk_prob": shape.norm_topk_prob,
    }


def _deepseek(shape: Shape) -> dict:
    """Heads have other widths than hidden_size / heads: 16 + 8 of queries and keys, 12 of
    values."""
    latent = dict(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    groups = dict(n_group=2, topk_group=shape.experts_per_token // 2, first_k_dense_replace=1)
    # read by DeepSeek's own code and by SGLang, but not by transformers
    router = dict(moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid")
    heads = dict(num_key_value_heads=shape.heads, head_dim=None)
    return _mixture(shape, "n_routed_experts") | latent | groups | router | heads


def _glm4_moe_lite(shape: Shape) -> dict:
    """Values are as wide as keys."""
    latent = dict(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
    heads = dict(num_key_value_heads=shape.heads, head_dim=None)
    # SGLang reads the first of these, transformers has it under another name
    others = dict(first_k_dense_replace=1, routed_scaling_factor=1.8, rms_norm_eps=LARGE_EPSILON)
    return _mixture(shape, "n_routed_experts") | latent | heads | others


def _gpt_oss(shape: Shape) -> dict:
    """Some products of each expert lie beyond the limit."""
    experts = dict(num_local_experts=shape.num_experts, num_experts_per_tok=shape.experts_per_token)
    return experts | dict(intermediate_size=shape.hidden // 2, sliding_window=8, swiglu_limit=1.0)


def hybrid_layers(layers: int, every: int) -> dict:
    """Which layers have attention, as SGLang reads it and as transformers does."""
    kinds = ["full_attention" if number % every == 0 else "linear_attention" for number in range(1, layers + 1)]
    return dict(full_attention_interval=every, layer_types=kinds)


def _hybrid(shape: Shape) -> dict:
    """Every other layer has attention; heads of keys and values have other widths and numbers.

    A segment's first token reads its value times the product of its query and key, which is near 0
    for some random ones. A norm divides by the result, so its epsilon is large.
    """
    heads = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=12, linear_value_head_dim=8)
    return heads | hybrid_layers(shape.layers, 2) | dict(rms_norm_eps=1e-3)


def _hybrid_mixture(shape: Shape) -> dict:
    return _hybrid(shape) | _mixture(shape) | dict(shared_expert_intermediate_size=shape.hidden)


FAMILIES: dict[str, TinyFamily] = {
    "qwen2": TinyFamily(
        Qwen2Config,
        Qwen2ForCausalLM,
        num_served=2 * (2 + 1 + 2 + 2) + 3,
        parity={"qwen2": {}, "qwen2_tied": dict(tied=True)},
        converted={"qwen2_bf16_files": {}, "qwen2_tied_files": dict(tied=True)},
    ),
    "qwen3": TinyFamily(
        Qwen3Config,
        Qwen3ForCausalLM,
        num_served=2 * (1 + 2 + 1 + 2 + 2) + 3,
        parity={"qwen3": dict(vocab=128), "qwen3_tied": dict(tied=True)},
        converted={"qwen3_bf16": {}, "qwen3_tied_bf16_files": dict(tied=True)},
    ),
    "llama": TinyFamily(
        LlamaConfig,
        LlamaForCausalLM,
        num_served=2 * (1 + 1 + 2 + 2) + 3,
        parity={"llama": {}, "llama_tied": dict(vocab=128, tied=True), "llama3_rope": dict(rope=LLAMA3_ROPE)},
        converted={
            "llama_files": dict(layers=5),  # two stages have 3 and 2
            "llama_tied_bf16": dict(vocab=128, tied=True),
        },
    ),
    "mistral": TinyFamily(
        MistralConfig,
        MistralForCausalLM,
        num_served=2 * (1 + 1 + 2 + 2) + 3,
        fields=lambda shape: dict(sliding_window=None),
        parity={"mistral_yarn": dict(rope=YARN_ROPE)},
    ),
    "glm4": TinyFamily(
        Glm4Config,
        Glm4ForCausalLM,
        num_served=2 * (2 + 1 + 2 + 4) + 3,
        has_own_layers=True,
        modules=(*ATTENTION, "gate_up_proj", "down_proj"),
        num_adapted=lambda num_experts: 2 * (4 + 2),
        converted={"glm4_bf16_files": {}},
    ),
    "gemma3": TinyFamily(
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        num_served=2 * (1 + 2 + 1 + 2 + 4) + 2,
        # every other layer sees 8 tokens; products are not divided by the root of head_dim; tied,
        # as all checkpoints
        fields=lambda shape: dict(
            sliding_window=8, sliding_window_pattern=2, query_pre_attn_scalar=shape.hidden, tie_word_embeddings=True
        ),
        rope=GEMMA3_ROPE,
        has_own_layers=True,
        norm_mean=0.0,  # norms multiply by 1 + weight
        converted={"gemma3_bf16": {}},
    ),
    "qwen3_moe": TinyFamily(
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        # q, k and v in one, their norms, o, two norms, the router, two of all experts
        num_served=2 * (1 + 2 + 1 + 2 + 1 + 2) + 3,
        fields=_mixture,
        is_mixture=True,
        num_adapted=lambda num_experts: 2 * (4 + 3 * num_experts),
        parity={"qwen3_moe": {}, "qwen3_moe_tied": dict(tied=True, norm_topk_prob=False, experts_per_token=3)},
        converted={"qwen3_moe_bf16_files": {}, "qwen3_moe_tied": dict(tied=True, num_experts=6, layers=3)},
    ),
    "glm4_moe": TinyFamily(
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        # a dense layer; one with a router, its bias, and two each of all experts and of the shared
        # one
        num_served=(2 + 1 + 2 + 2) + (2 + 1 + 2 + 2 + 2 + 2) + 3,
        fields=lambda shape: _mixture(shape, "n_routed_experts") | dict(routed_scaling_factor=1.5, attention_bias=True),
        is_mixture=True,
        num_adapted=lambda num_experts: 2 * 4 + 3 + 3 * (num_experts + 1),
        # norms of query and key, groups of experts, two shared experts, two dense layers, more of a
        # head rotated
        parity={
            "glm4_moe": {},
            "glm4_moe_groups": dict(
                tied=True,
                experts_per_token=4,
                more=dict(
                    use_qk_norm=True,
                    attention_bias=False,
                    n_group=4,
                    topk_group=2,
                    n_shared_experts=2,
                    first_k_dense_replace=2,
                    partial_rotary_factor=0.75,
                ),
            ),
        },
        converted={"glm4_moe_bf16_files": {}},
    ),
    "deepseek_v3": TinyFamily(
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        # attention: both vectors and keys in one, two norms, two products of the vectors, o
        num_served=(1 + 2 + 2 + 1 + 2 + 2) + (1 + 2 + 2 + 1 + 2 + 2 + 2 + 2) + 3,
        fields=_deepseek,
        rope=SHORT_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        is_mixture=True,
        has_own_layers=True,
        error=None,
        modules=(*LATENT, *MLP),
        num_adapted=lambda num_experts: 2 * 5 + 3 + 3 * (num_experts + 1),
        # queries of the hidden states, pairs of one of each half, frequencies that are not scaled,
        # two of four groups; no groups, a step between two pairs' frequencies, a large epsilon
        parity={
            "deepseek_v3": {},
            "deepseek_v3_whole_queries": dict(
                tied=True,
                experts_per_token=4,
                rope={"rope_type": "default", "rope_theta": 10000.0},
                more=dict(q_lora_rank=None, rope_interleave=False, n_group=4, first_k_dense_replace=2),
            ),
            "kimi_k2": dict(
                experts_per_token=4,
                rope=SHORT_YARN | KIMI_YARN,
                more=dict(n_group=1, topk_group=1, routed_scaling_factor=2.827, rms_norm_eps=LARGE_EPSILON),
            ),
        },
        converted={"deepseek_v3_bf16_files": {}},
    ),
    "glm4_moe_lite": TinyFamily(
        Glm4MoeLiteConfig,
        Glm4MoeLiteForCausalLM,
        num_served=(1 + 2 + 2 + 1 + 2 + 2) + (1 + 2 + 2 + 1 + 2 + 2 + 2 + 2) + 3,  # as DeepSeek-V3
        fields=_glm4_moe_lite,
        rope={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
        is_mixture=True,
        error=None,
        modules=(*LATENT, *MLP),
        num_adapted=lambda num_experts: 2 * 5 + 3 + 3 * (num_experts + 1),
        converted={"glm4_moe_lite_bf16_files": {}},
    ),
    "qwen3_5": TinyFamily(
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        # a delta net: the products of q, k, v, z and of b, a, the convolution, A_log, dt_bias, a
        # norm, out; an attention
        num_served=(7 + 2 + 2) + (1 + 2 + 1 + 2 + 2) + 3,
        fields=_hybrid,
        rope=AXES_ROPE,
        has_own_layers=True,
        norm_mean=0.0,  # norms multiply by 1 + weight, but for the delta nets' own
        error=HYBRID_ERROR,
        modules=(*DELTA_NET, *ATTENTION, *MLP),
        num_adapted=lambda num_experts: (5 + 3) + (4 + 3),
        # the first stage of two has only delta nets
        parity={"qwen3_5": {}, "qwen3_5_tied": dict(tied=True, more=hybrid_layers(4, 4))},
        converted={"qwen3_5_bf16_files": {}},
    ),
    "qwen3_5_moe": TinyFamily(
        Qwen3_5MoeTextConfig,
        Qwen3_5MoeForCausalLM,
        # after the two norms: the router, two of all experts, two of the shared one, its gate
        num_served=(7 + 2 + 6) + (1 + 2 + 1 + 2 + 6) + 3,
        fields=_hybrid_mixture,
        rope=HYBRID_ROPE,
        is_mixture=True,
        norm_mean=0.0,
        error=HYBRID_ERROR,
        modules=(*DELTA_NET, *ATTENTION, *MLP),
    ),
    "qwen3_next": TinyFamily(
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        num_served=(7 + 2 + 6) + (1 + 2 + 1 + 2 + 6) + 3,
        fields=_hybrid_mixture,
        rope=HYBRID_ROPE,
        is_mixture=True,
        has_own_layers=True,
        norm_mean=0.0,
        error=HYBRID_ERROR,
        modules=("in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION, *MLP),
        num_adapted=lambda num_experts: (3 + 4) + 2 * 3 * (num_experts + 1),
        parity={"qwen3_next": dict(norm_topk_prob=False, experts_per_token=3)},
        converted={"qwen3_next_bf16_files": {}},
    ),
    "gpt_oss": TinyFamily(
        GptOssConfig,
        GptOssForCausalLM,
        # qkv, o and the router with biases, sinks, two norms, two of all experts with biases
        num_served=2 * (2 + 2 + 2 + 1 + 2 + 4) + 3,
        fields=_gpt_oss,
        rope=SHORT_YARN | {"truncate": False},
        is_mixture=True,
        has_own_layers=True,
        cuts_experts=False,
        modules=ATTENTION,  # experts are no modules
        num_adapted=lambda num_experts: 2 * 4,
        converted={"gpt_oss_bf16_files": {}},
    ),
}

MODULES = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.modules))


def parity_models(*, is_mixture: bool) -> dict[str, Options]:
    """Return the checkpoints of dense families, or of mixtures, for the comparison with
    transformers. The vocabulary is odd, so it is padded under tensor parallelism."""
    return {
        name: {"family": family, "vocab": 131, **options}
        for family, row in FAMILIES.items()
        if row.is_mixture == is_mixture
        for name, options in (row.parity or {family: {}}).items()
    }


def converted_models() -> dict[str, Options]:
    """Return the checkpoints for a conversion there and back, with an odd vocabulary."""
    return {
        name: {"family": family, "vocab": 131, **options}
        for family, row in FAMILIES.items()
        for name, options in (row.converted or {family: {}}).items()
    }


def own_layers(*, is_mixture: bool | None = None) -> tuple[str, ...]:
    """Return the families with layers unlike the others';
    is_mixture: only mixtures, or only dense ones."""
    return tuple(
        name
        for name, row in FAMILIES.items()
        if row.has_own_layers and (is_mixture is None or row.is_mixture == is_mixture)
    )


def as_served(model: Any) -> Any:
    """Return a model of transformers with `rms_norm_eps` in all norms, as in SGLang; transformers
    takes 1e-6 for those of latent vectors."""
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps
    return model
