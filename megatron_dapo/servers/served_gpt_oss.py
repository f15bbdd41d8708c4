"""SGLang's class for gpt-oss, made to compute in the trainer's type."""

from typing import Any

import torch
from sglang.srt.models import gpt_oss


class GptOssForCausalLM(gpt_oss.GptOssForCausalLM):
    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        # SGLang 0.5.23 makes attention's products and the router in the type of the checkpoint, and
        # all else in that of --dtype, the default while it makes a model. If they differ, the first
        # product raises.
        config.dtype = torch.get_default_dtype()
        super().__init__(config, *arguments, **options)
