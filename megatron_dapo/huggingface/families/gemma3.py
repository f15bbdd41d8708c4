"""Gemma 3, the models of text alone."""

from megatron_dapo.huggingface.family import DENSE, Family, NeutralValues
from megatron_dapo.huggingface.weight_rows import DECODER, changed, norm_before_mlp, output_norms

# SGLang answers with the embedding as head, whatever tie_word_embeddings says, and without
# final_logit_softcapping.
NEUTRAL: NeutralValues = {
    **{name: rule for name, rule in DENSE.items() if name not in ("hidden_act", "layer_types")},
    "hidden_activation": lambda value: value == "gelu_pytorch_tanh",
    "tie_word_embeddings": lambda value: value is True,
    "attn_logit_softcapping": lambda value: value is None,
    "final_logit_softcapping": lambda value: value is None,
    "use_bidirectional_attention": lambda value: not value,
}
FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    server_class="sglang.srt.models.gemma3_causal:Gemma3ForCausalLM",
    neutral=NEUTRAL,
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    rows=changed(
        DECODER,
        norm_before_mlp("pre_feedforward_layernorm"),
        *output_norms("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    qk_norm=True,
    windows="rotated apart",
    spec_fields=lambda hf: {
        "output_norms": True,
        "zero_centered_norms": True,
        "embedding_scale": hf["hidden_size"] ** 0.5,
        "attention_dim": hf["query_pre_attn_scalar"],
        "activation": "gelu_tanh",
    },
)
