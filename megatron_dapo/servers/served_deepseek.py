"""SGLang's classes for DeepSeek-V3 and GLM-4.7-Flash, made to attend on CPUs."""

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteForCausalLM

__all__ = ["DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"]

# SGLang 0.5.23 would multiply the queries of a whole prompt with whole keys there. It would look
# for these in its cache, which has the latent vectors.
AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
