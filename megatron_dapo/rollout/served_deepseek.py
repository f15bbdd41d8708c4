"""DeepSeek-V3 in SGLang's class, such that a push may come in any buckets and servers on CPUs can attend."""

from collections.abc import Iterable
from typing import Any

from sglang.srt.models import deepseek_v2
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from torch import Tensor

from megatron_dapo.rollout.paired_tensors import PairedTensors

# SGLang 0.5.23 would multiply the queries of a whole prompt with whole keys there, and look for these in its cache,
# which has the latent vectors.
AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


class DeepseekV3ForCausalLM(deepseek_v2.DeepseekV3ForCausalLM):
    """SGLang stores two modules of a layer as one, and drops the one that comes in another call than the other."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self._in_pairs = PairedTensors("q_a_proj", "kv_a_proj_with_mqa") if self.fuse_qkv_a_proj else iter

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], is_nextn: bool = False) -> None:
        super().load_weights(self._in_pairs(weights), is_nextn)
