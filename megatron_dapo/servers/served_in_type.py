"""SGLang's classes for gpt-oss and Qwen3-Next, made to compute in the trainer's type.

SGLang 0.5.23 makes parts of these models in the type of the checkpoint (gpt-oss: attention's
products and the router; Qwen3-Next: the gated norms), and all else in that of --dtype, the default
while it makes a model. If they differ, gpt-oss's first product raises, and Qwen3-Next's norms are
rounded.
"""

from typing import Any

import torch
from sglang.srt.models import gpt_oss, qwen3_next
from torch import nn


class _InTrainersType(nn.Module):
    """Gives the checkpoint's configuration the type of --dtype."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        config.dtype = torch.get_default_dtype()
        super().__init__(config, *arguments, **options)


class GptOssForCausalLM(_InTrainersType, gpt_oss.GptOssForCausalLM):
    """As SGLang's."""


class Qwen3NextForCausalLM(_InTrainersType, qwen3_next.Qwen3NextForCausalLM):
    """As SGLang's."""
