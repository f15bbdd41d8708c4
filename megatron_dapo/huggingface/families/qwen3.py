"""Qwen3."""

from megatron_dapo.huggingface.family import DENSE, Family

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    server_class="sglang.srt.models.qwen3:Qwen3ForCausalLM",
    tool_parser="qwen25",
    reasoning_parser="qwen3",
    neutral=DENSE,
    qk_norm=True,
)
