"""The operations whose cost decides a step, each with one entry point. Import from here."""

from megatron_dapo.kernels.from_logits import logprob_entropy_from_logits
from megatron_dapo.kernels.fused_head import Head, HeadLoss, fused_dapo_head, head_log_probs
from megatron_dapo.kernels.linear_logprob import linear_logprob_entropy
from megatron_dapo.kernels.row_plan import RowPlan
from megatron_dapo.kernels.self_check import largest_error
from megatron_dapo.kernels.token_loss import TokenLoss, token_loss

__all__ = [
    "Head",
    "HeadLoss",
    "RowPlan",
    "TokenLoss",
    "fused_dapo_head",
    "head_log_probs",
    "largest_error",
    "linear_logprob_entropy",
    "logprob_entropy_from_logits",
    "token_loss",
]
