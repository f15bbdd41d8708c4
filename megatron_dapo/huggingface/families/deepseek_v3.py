"""DeepSeek-V3, R1 and Kimi-K2, in bfloat16."""

from megatron_dapo.huggingface.family import SHARED_MIXTURE, Family, NeutralValues
from megatron_dapo.huggingface.latent import LatentAttention
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.weight_rows import (
    ATTENTION,
    DECODER,
    HF_ATTENTION,
    HF_LAYER,
    ROUTER,
    Row,
    changed,
    router_shape,
)

# Kimi-K2 calls itself kimi_k2, which transformers and SGLang know only by Python code of its
# folder. transformers has only the kind of router that topk_method, scoring_func and
# moe_layer_freq name; SGLang reads them, so that they must be there. With router_fp32 SGLang holds
# the weight of a router in float32.
NEUTRAL: NeutralValues = {
    **SHARED_MIXTURE,
    "model_type": lambda value: value in (None, "deepseek_v3"),
    "attention_bias": lambda value: not value,
    "topk_method": lambda value: value == "noaux_tc",
    "scoring_func": lambda value: value == "sigmoid",
    "moe_layer_freq": lambda value: value == 1,
    "router_fp32": lambda value: not value,
}


def _latent(m: ModelSpec) -> LatentAttention:
    assert m.latent is not None, "the row is of a latent attention"
    return m.latent


def _has_latent_queries(m: ModelSpec) -> bool:
    return m.latent is not None and m.latent.q_rank is not None


def _q_rank(m: ModelSpec) -> int:
    return _latent(m).q_rank or 0


def _down_keys(m: ModelSpec) -> tuple[int, ...]:
    return _latent(m).kv_rank + m.rotary_dim, m.hidden_size


LATENT_ROWS = changed(
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
)  # fmt: skip
ROWS = changed(
    LATENT_ROWS,
    # unlike other routers with a bias, SGLang's has the type of the model
    Row(ROUTER + "weight", (HF_LAYER + "mlp.gate.weight",), "same", router_shape, in_layer=ModelSpec.has_experts),
)
FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    server_class="megatron_dapo.servers.served_deepseek:DeepseekV3ForCausalLM",
    tool_parser="deepseekv3",
    neutral=NEUTRAL,
    defaults={
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "rope_interleave": True,
        "topk_method": None,
        "scoring_func": None,
        "moe_layer_freq": None,
    },
    rows=ROWS,
    ffn_key="moe_intermediate_size",
    is_moe=True,
    has_shared_experts=True,
    is_latent=True,
    spec_fields=lambda hf: {"rotary_interleaved": bool(hf["rope_interleave"])},
)
