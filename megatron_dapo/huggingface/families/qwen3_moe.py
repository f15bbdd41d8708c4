"""Qwen3-MoE."""

from megatron_dapo.huggingface.family import MIXTURE, Family

FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    server_class="sglang.srt.models.qwen3_moe:Qwen3MoeForCausalLM",
    tool_parser="qwen25",
    reasoning_parser="qwen3",
    neutral=MIXTURE,
    qk_norm=True,
    ffn_key="moe_intermediate_size",
    is_moe=True,
)
