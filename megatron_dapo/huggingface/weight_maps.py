"""The weight rows of each family."""

from megatron_dapo.huggingface.latent import LatentAttention
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.weight_rows import (
    ALL_EXPERTS,
    ATTENTION,
    DECODER,
    EXPERT,
    HF_ATTENTION,
    HF_LAYER,
    LAYER,
    ROUTER,
    Row,
    changed,
    moe,
    norm_before_mlp,
    norm_shape,
    output_norms,
    router_shape,
)

GLM4 = changed(
    DECODER,
    Row(
        LAYER + "mlp.linear_fc1.weight", (HF_LAYER + "mlp.gate_up_proj.weight",), "same",
        lambda m: [(2 * m.ffn_size, m.hidden_size)], cut=0, blocks=lambda m: [(m.ffn_size, m.ffn_size)],
    ),
    *output_norms("post_self_attn_layernorm", "post_mlp_layernorm"),
)  # fmt: skip
GEMMA3 = changed(
    DECODER,
    norm_before_mlp("pre_feedforward_layernorm"),
    *output_norms("post_attention_layernorm", "post_feedforward_layernorm"),
)


def _latent(m: ModelSpec) -> LatentAttention:
    assert m.latent is not None, "the row is of a latent attention"
    return m.latent


def _has_latent_queries(m: ModelSpec) -> bool:
    return m.latent is not None and m.latent.q_rank is not None


def _q_rank(m: ModelSpec) -> int:
    return _latent(m).q_rank or 0


def _down_keys(m: ModelSpec) -> tuple[int, ...]:
    return _latent(m).kv_rank + m.rotary_dim, m.hidden_size


DEEPSEEK = changed(
    tuple(row for row in DECODER if ".linear_qkv." not in row.megatron),
    Row(
        # SGLang 0.5.23 drops one that comes without the other
        ATTENTION + "linear_down.weight",
        (HF_ATTENTION + "q_a_proj.weight", HF_ATTENTION + "kv_a_proj_with_mqa.weight"), "latent",
        lambda m: [(_q_rank(m), m.hidden_size), _down_keys(m)], where=_has_latent_queries, sent_together=True,
        served_as=HF_ATTENTION + "fused_qkv_a_proj_with_mqa.weight",
    ),
    Row(
        ATTENTION + "linear_down.weight", (HF_ATTENTION + "kv_a_proj_with_mqa.weight",), "latent",
        lambda m: [_down_keys(m)], where=lambda m: not _has_latent_queries(m),
    ),
    Row(
        ATTENTION + "q_layernorm.weight", (HF_ATTENTION + "q_a_layernorm.weight",), "same", lambda m: [(_q_rank(m),)],
        where=_has_latent_queries,
    ),
    Row(
        ATTENTION + "kv_layernorm.weight", (HF_ATTENTION + "kv_a_layernorm.weight",), "same",
        lambda m: [(_latent(m).kv_rank,)],
    ),
    Row(
        ATTENTION + "linear_q.weight", (HF_ATTENTION + "q_b_proj.weight",), "latent_queries",
        lambda m: [(m.num_heads * m.head_dim, _q_rank(m))], cut=0, where=_has_latent_queries,
    ),
    Row(
        ATTENTION + "linear_q.weight", (HF_ATTENTION + "q_proj.weight",), "latent_queries",
        lambda m: [(m.num_heads * m.head_dim, m.hidden_size)], cut=0, where=lambda m: not _has_latent_queries(m),
    ),
    Row(
        ATTENTION + "linear_kv.weight", (HF_ATTENTION + "kv_b_proj.weight",), "same",
        lambda m: [(m.num_heads * (_latent(m).plain_dim + m.value_dim), _latent(m).kv_rank)], cut=0,
    ),
    # unlike other routers with a bias, SGLang's has the type of the model
    Row(ROUTER + "weight", (HF_LAYER + "mlp.gate.weight",), "same", router_shape, in_layer=ModelSpec.has_experts),
)  # fmt: skip

_STACKED = HF_LAYER + "mlp.experts."
GPT_OSS = changed(
    DECODER,
    Row(
        EXPERT + "linear_fc1.weight", (_STACKED + "gate_up_proj",), "interleaved",
        lambda m: [(m.hidden_size, 2 * m.ffn_size)], cut=1, alias=ALL_EXPERTS + "linear_fc1.weight{e}",
        is_stacked=True, served_as=_STACKED + "w13_weight",
    ),
    Row(
        EXPERT + "linear_fc1.bias", (_STACKED + "gate_up_proj_bias",), "interleaved", lambda m: [(2 * m.ffn_size,)],
        cut=0, alias=ALL_EXPERTS + "linear_fc1.bias{e}", is_stacked=True, served_as=_STACKED + "w13_weight_bias",
        served_types=lambda m: ("float32",),
    ),
    Row(
        EXPERT + "linear_fc2.weight", (_STACKED + "down_proj",), "transposed", lambda m: [(m.ffn_size, m.hidden_size)],
        cut=0, alias=ALL_EXPERTS + "linear_fc2.weight{e}", is_stacked=True, served_as=_STACKED + "w2_weight",
    ),
    Row(
        # each rank of a server adds its bias to its part of a sum
        EXPERT + "linear_fc2.bias", (_STACKED + "down_proj_bias",), "same", norm_shape, served_once=True,
        alias=ALL_EXPERTS + "linear_fc2.bias{e}", is_stacked=True, served_as=_STACKED + "w2_weight_bias",
        served_types=lambda m: ("float32",),
    ),
    Row(ROUTER + "weight", (HF_LAYER + "mlp.router.weight",), "same", router_shape),
    Row(ROUTER + "bias", (HF_LAYER + "mlp.router.bias",), "same", lambda m: [(moe(m).num_experts,)]),
    Row(ATTENTION + "linear_proj.bias", (HF_ATTENTION + "o_proj.bias",), "same", norm_shape),
    Row(
        # in float32 with the kernels of a B200
        ATTENTION + "core_attention.softmax_offset", (HF_ATTENTION + "sinks",), "same", lambda m: [(m.num_heads,)],
        cut=0, served_types=lambda m: ("bfloat16", "float32"),
    ),
)  # fmt: skip

WEIGHT_MAPS: dict[str, tuple[Row, ...]] = {
    "Qwen2ForCausalLM": DECODER,
    "Qwen3ForCausalLM": DECODER,
    "LlamaForCausalLM": DECODER,
    "MistralForCausalLM": DECODER,
    "Glm4ForCausalLM": GLM4,
    "Gemma3ForCausalLM": GEMMA3,
    "Qwen3MoeForCausalLM": DECODER,
    "Glm4MoeForCausalLM": DECODER,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "GptOssForCausalLM": GPT_OSS,
}
