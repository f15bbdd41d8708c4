"""Mistral without a sliding window."""

from megatron_dapo.huggingface.family import DENSE, Family

FAMILY = Family(
    architecture="MistralForCausalLM",
    server_class="sglang.srt.models.llama:LlamaForCausalLM",  # as in SGLang, whose module imports models of images too
    tool_parser="mistral",
    neutral={**DENSE, "sliding_window": lambda value: value is None},
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
