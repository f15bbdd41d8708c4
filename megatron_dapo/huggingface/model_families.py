"""The trainable families."""

from megatron_dapo.huggingface.families import (
    deepseek_v3,
    gemma3,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from megatron_dapo.huggingface.family import Family

_MODULES = (
    qwen2, qwen3, llama, mistral, glm4, gemma3, qwen3_moe, glm4_moe, deepseek_v3, glm4_moe_lite, gpt_oss,
)  # fmt: skip
_FAMILIES = (*(module.FAMILY for module in _MODULES), qwen3_5.FAMILY, qwen3_5.MIXTURE_FAMILY, qwen3_next.FAMILY)
FAMILIES: dict[str, Family] = {family.architecture: family for family in _FAMILIES}
"""Architecture -> family."""
