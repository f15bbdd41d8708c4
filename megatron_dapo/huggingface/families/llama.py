"""Llama 3, the plain decoder."""

from megatron_dapo.huggingface.family import DENSE, Family

FAMILY = Family(
    architecture="LlamaForCausalLM",
    server_class="sglang.srt.models.llama:LlamaForCausalLM",
    tool_parser="llama3",
    neutral=DENSE,
)
