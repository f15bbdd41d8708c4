"""gpt-oss, in bfloat16."""

from megatron_dapo.huggingface.family import MIXTURE, Family, NeutralValues
from megatron_dapo.huggingface.weight_rows import (
    ALL_EXPERTS,
    ATTENTION,
    DECODER,
    EXPERT,
    HF_ATTENTION,
    HF_LAYER,
    ROUTER,
    Row,
    changed,
    moe,
    norm_shape,
    router_shape,
)

# The factor in the sigmoid has one name in transformers and another in SGLang, which also has a
# head of its own always. Without layer_types transformers has a window in every other layer,
# whatever sliding_window_pattern says. In SGLang the weights of a token's experts are divided by
# their sum, as in transformers, whatever config.json says.
NEUTRAL: NeutralValues = {
    **{name: rule for name, rule in MIXTURE.items() if name != "layer_types"},
    "attention_bias": lambda value: value is True,
    "swiglu_alpha": lambda value: value == 1.702,
    "hidden_act_alpha": lambda value: value == 1.702,
    "norm_topk_prob": lambda value: value is True,
    "sliding_window_pattern": lambda value: value == 2,
    "tie_word_embeddings": lambda value: not value,
}

_STACKED = HF_LAYER + "mlp.experts."
ROWS = changed(
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
FAMILY = Family(
    architecture="GptOssForCausalLM",
    server_class="megatron_dapo.servers.served_in_type:GptOssForCausalLM",
    tool_parser="gpt-oss",
    reasoning_parser="gpt-oss",
    neutral=NEUTRAL,
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "norm_topk_prob": True,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "swiglu_limit": 7.0,
    },
    required=("swiglu_limit",),
    rows=ROWS,
    qkv_bias=True,
    is_moe=True,
    windows="rotated alike",
    needs_rope=True,
    spec_fields=lambda hf: {
        "product_rounded_norms": True,
        "activation": "quick_gelu",
        "glu_limit": float(hf["swiglu_limit"]),
        "linear_biases": True,
        "attention_sinks": True,
    },
)
