"""The operations whose cost decides a step, each with one entry point. Import from here."""

from megatron_dapo.kernels.from_logits import logprob_entropy_from_logits
from megatron_dapo.kernels.full_kl import linear_full_kl
from megatron_dapo.kernels.fused_head import (
    Head,
    HeadLoss,
    Reference,
    fused_dapo_head,
    gathered_rows,
    head_full_kl,
    head_log_probs,
)
from megatron_dapo.kernels.linear_logprob import linear_logprob_entropy
from megatron_dapo.kernels.row_plan import RowPlan, to_device
from megatron_dapo.kernels.self_check import Check, Error, largest_errors
from megatron_dapo.kernels.token_loss import TokenLoss, token_loss

__all__ = [
    "Check",
    "Error",
    "Head",
    "HeadLoss",
    "Reference",
    "RowPlan",
    "TokenLoss",
    "fused_dapo_head",
    "gathered_rows",
    "head_full_kl",
    "head_log_probs",
    "largest_errors",
    "linear_full_kl",
    "linear_logprob_entropy",
    "logprob_entropy_from_logits",
    "to_device",
    "token_loss",
]
