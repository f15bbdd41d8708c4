"""Transformer Engine's user buffers: memory of tensor-parallel ranks for exchanging activations.

They exchange while they multiply.
"""

from typing import NamedTuple

import torch

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.key_names import MEGATRON


class _Shape(NamedTuple):
    num_tokens: int
    hidden_size: int
    tp: int


_made: list[_Shape] = []  # a process has one set of them


def make_user_buffers(num_tokens: int, hidden_size: int, tp: int) -> None:
    """Allocate the buffers for bfloat16 activations of exactly this number of tokens.

    Call it before building the layers. A second model of the same shape, the reference, shares
    them. Collective over all ranks. Raises UserError, with Transformer Engine's reason, for GPUs
    that cannot have them.

    num_tokens: of a micro-batch on all tensor-parallel ranks; with context parallelism, of its
    part.
    """
    shape = _Shape(num_tokens, hidden_size, tp)
    if _made:
        if _made != [shape]:
            raise UserError(
                f"{MEGATRON}.tp_comm_overlap is true, but the actor has hidden size {_made[0].hidden_size} and the "
                f"reference {hidden_size}, and a process has buffers for one; set it to false, or "
                f"actor_rollout_ref.ref.path to a model of the actor's size."
            )
        return
    from transformer_engine.pytorch.module import base

    try:
        base.initialize_ub(
            shape=[num_tokens, hidden_size],
            tp_size=tp,
            quantization_modes=[base.UserBufferQuantizationMode.NONE],
            dtype=torch.bfloat16,
            bootstrap_backend="nccl",
        )
    except RuntimeError as error:  # no multicast on these GPUs, or a build for MPI without MPI
        raise UserError(
            f"{MEGATRON}.tp_comm_overlap is true, but Transformer Engine cannot make its buffers: "
            f"{' '.join(str(error).split())} Set it to false."
        ) from error
    _made.append(shape)


def release_user_buffers() -> None:
    """Free the buffers, if there are any, before the process groups go."""
    if _made:
        from transformer_engine.pytorch.module import base

        base.destroy_ub()
        _made.clear()
