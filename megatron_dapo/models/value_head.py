"""The head of the critic: one number per position in the place of Megatron's `output_layer`."""

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_dapo.models.layers import mark

# prefix of its parameters in a checkpoint: an actor's output_layer is another thing
VALUE_HEAD_PREFIX = "value_head."


class ValueHead(torch.nn.Module):
    """V = h . w + b. Zero until weights are loaded or learned: the first values are 0 in every
    layout.

    Whole on every tensor-parallel rank. With sequence parallelism, a rank sees its part of the
    positions and sends back the gradient of that part. The marks on the parameters make Megatron
    sum their gradients over the ranks.
    """

    def __init__(self, config: TransformerConfig, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel  # Megatron reads it off an output layer
        self._group = group
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in self.parameters():
            mark(parameter, sequence_parallel=config.sequence_parallel)

    def forward(self, hidden: Tensor, weight: None = None, task: None = None) -> Tensor:
        """Return the values [B, S] float32 of hidden [S (/ tp with sequence parallelism), B, H]."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            # every rank computes the whole loss: each takes back its own positions' gradient,
            # without a sum
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self._group)
        return values[..., 0].t().contiguous()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets=(), metadata=None) -> dict:
        described = make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix)
        for part in described.values():
            part.key = VALUE_HEAD_PREFIX + part.key.removeprefix(prefix)
        return described
