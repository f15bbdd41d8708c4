"""Qwen2 and Qwen2.5."""

from megatron_dapo.huggingface.family import DENSE, Family

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    server_class="sglang.srt.models.qwen2:Qwen2ForCausalLM",
    tool_parser="qwen25",
    neutral=DENSE,
    qkv_bias=True,
)
