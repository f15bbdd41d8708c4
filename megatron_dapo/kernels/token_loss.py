"""Computes the actor's loss of given log-probs, its gradient and every metric in one forward call.

There is one algorithm, `algorithms.dapo_loss`. On CUDA one launch and a small reduction compute it;
on other devices it runs as written and is differentiated.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss, metric_names
from megatron_dapo.algorithms.metrics import stack_maxima, stack_sums
from megatron_dapo.kernels.logits_chunk import runs_on_triton


class TokenLoss(NamedTuple):
    """The result of `token_loss`, on the device of the log-probs and without gradient."""

    loss_sum: Tensor
    """Scalar, to be divided by the global count."""
    grad_log_probs: Tensor
    """[N], d loss_sum / d log_probs."""
    grad_entropy: Tensor | None
    """[N], or None if the loss does not depend on the entropy."""
    sums: Tensor
    """[K, 2] float64, (sum, count) rows in the order of `algorithms.metric_names`."""
    maxima: Tensor
    """[M] float64, in that order."""
    grad_kl: Tensor | None = None
    """[N], or None without a KL."""


def token_loss(
    log_probs_N: Tensor,
    entropy_N: Tensor | None,
    tokens: TokenBatch,
    config: LossConfig,
    kl_N: Tensor | None = None,
) -> TokenLoss:
    """Return the loss of N tokens and its gradient; every field of `tokens` is [N] (or None),
    `count` a scalar.

    On CUDA Triton computes it. On every device, float64 and ratios of whole sequences are computed
    by `dapo_loss` and autograd. Nothing waits for the device.

    Args:
        entropy_N: with report_entropy.
        kl_N: with use_full_kl.
        tokens: if the sums of several parts of a batch are added, one part carries the count.
    """
    if runs_on_triton(log_probs_N) and not config.is_over_sequences:
        from megatron_dapo.kernels.triton_ops import loss_kernel as triton_ops

        return triton_ops.token_loss(log_probs_N, entropy_N, tokens, config, kl_N)
    with torch.enable_grad():
        inputs = {"log_probs": log_probs_N.detach().requires_grad_()}
        if entropy_N is not None and config.sends_entropy_backward:
            inputs["entropy"] = entropy_N.detach().requires_grad_()
        if kl_N is not None and config.use_full_kl:
            inputs["kl"] = kl_N.detach().requires_grad_()
        outputs = TokenOutputs(inputs["log_probs"], inputs.get("entropy", entropy_N), inputs.get("kl"))
        result = dapo_loss(outputs, tokens, config)
        grads = dict(zip(inputs, torch.autograd.grad(result.loss_sum, [*inputs.values()]), strict=True))
    sum_names, max_names = metric_names(config)
    return TokenLoss(
        result.loss_sum.detach(),
        grads["log_probs"],
        grads.get("entropy"),
        stack_sums(result.sums, sum_names, log_probs_N.device),
        stack_maxima(result.maxima, max_names, log_probs_N.device),
        grads.get("kl"),
    )
