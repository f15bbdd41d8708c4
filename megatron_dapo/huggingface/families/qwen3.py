"""Qwen3."""

from megatron_dapo.huggingface.family import DENSE, Family

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    server_class="sglang.srt.models.qwen3:Qwen3ForCausalLM",
    neutral=DENSE,
    qk_norm=True,
)
