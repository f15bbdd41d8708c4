"""GLM-4.5, 4.6 and Air."""

from megatron_dapo.huggingface.family import SHARED_MIXTURE, Family

FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    server_class="sglang.srt.models.glm4_moe:Glm4MoeForCausalLM",
    tool_parser="glm45",
    reasoning_parser="glm45",
    neutral=SHARED_MIXTURE,
    defaults={
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    qkv_bias=None,
    qk_norm=None,
    ffn_key="moe_intermediate_size",
    is_moe=True,
    has_shared_experts=True,
    partial_rotary=True,
)
