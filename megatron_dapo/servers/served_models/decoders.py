"""The families of docs/models.md, in SGLang's classes.

SGLang imports all of its two hundred models otherwise, image and speech models among them, and logs an error for each
that lacks a package. It still does so for an architecture that is not in this list.
"""

from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM
from sglang.srt.models.glm4 import Glm4ForCausalLM
from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

from megatron_dapo.servers.served_deepseek import DeepseekV3ForCausalLM
from megatron_dapo.servers.served_gpt_oss import GptOssForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """As in SGLang, whose module of it imports models of images too."""


EntryClass = [
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Glm4ForCausalLM,
    Glm4MoeForCausalLM,
    GptOssForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
]
