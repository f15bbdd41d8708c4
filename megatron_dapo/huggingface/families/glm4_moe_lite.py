"""GLM-4.7-Flash: DeepSeek-V3's latent attention before GLM-4.5's experts."""

from megatron_dapo.huggingface.families.deepseek_v3 import LATENT_ROWS
from megatron_dapo.huggingface.family import SHARED_MIXTURE, Family, NeutralValues


def _is_dense_once(value: object) -> bool:
    """Return whether only the first layer is dense."""
    return value is None or (isinstance(value, list) and value == ["dense", *["sparse"] * (len(value) - 1)])


# SGLang reads the number of dense layers from first_k_dense_replace, transformers from
# mlp_layer_types, and takes one if it is absent. Neither reads the fields of the router's kind.
# SGLang's attention has no biases, and its head is never the embedding.
NEUTRAL: NeutralValues = {
    **SHARED_MIXTURE,
    "attention_bias": lambda value: not value,
    "first_k_dense_replace": lambda value: value in (None, 1),
    "mlp_layer_types": _is_dense_once,
    "moe_layer_freq": lambda value: value in (None, 1),
    "topk_method": lambda value: value in (None, "noaux_tc"),
    "scoring_func": lambda value: value in (None, "sigmoid"),
    "tie_word_embeddings": lambda value: not value,
}
FAMILY = Family(
    architecture="Glm4MoeLiteForCausalLM",
    server_class="megatron_dapo.servers.served_deepseek:Glm4MoeLiteForCausalLM",
    tool_parser="glm47",
    reasoning_parser="glm45",
    neutral=NEUTRAL,
    defaults={
        "num_key_value_heads": 20,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "rope_interleave": True,
    },
    rows=LATENT_ROWS,
    ffn_key="moe_intermediate_size",
    is_moe=True,
    has_shared_experts=True,
    is_latent=True,
    spec_fields=lambda hf: {"rotary_interleaved": bool(hf["rope_interleave"])},
)
