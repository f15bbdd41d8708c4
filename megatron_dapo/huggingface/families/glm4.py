"""GLM-4 (GLM-4-0414, GLM-Z1)."""

from megatron_dapo.huggingface.family import DENSE, Family
from megatron_dapo.huggingface.weight_rows import DECODER, HF_LAYER, LAYER, Row, changed, output_norms

ROWS = changed(
    DECODER,
    Row(
        LAYER + "mlp.linear_fc1.weight", (HF_LAYER + "mlp.gate_up_proj.weight",), "same",
        lambda m: [(2 * m.ffn_size, m.hidden_size)], cut=0, blocks=lambda m: [(m.ffn_size, m.ffn_size)],
    ),
    *output_norms("post_self_attn_layernorm", "post_mlp_layernorm"),
)  # fmt: skip
FAMILY = Family(
    architecture="Glm4ForCausalLM",
    server_class="sglang.srt.models.glm4:Glm4ForCausalLM",
    neutral={name: rule for name, rule in DENSE.items() if name != "attention_bias"},
    defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    rows=ROWS,
    qkv_bias=None,
    partial_rotary=True,
    spec_fields=lambda hf: {"rotary_interleaved": True, "output_norms": True},
)
