"""How far the server's log-probs are from the trainer's for the same tokens, and the weights that correct it."""

import torch
from torch import Tensor

from megatron_dapo.algorithms.metrics import Maxima, Sums, masked_max, token_mean

MEAN_MISMATCH = "actor/rollout_abs_diff"


def mismatch_sums(trainer_log_probs: Tensor, rollout_log_probs: Tensor, counted: Tensor) -> tuple[Sums, Maxima]:
    """Return metric sums of d = trainer - rollout over the counted tokens, which the server drew.

    rollout_kl: k1 = -d; rollout_k3 = exp(d) - 1 - d (both estimate KL(server || trainer)); rollout_abs_diff = |d|, and
    its largest; rollout_ess (made by `finalize`): mean(w)^2 / mean(w^2) of w = exp(d), the effective share of tokens.
    In exp, d is clamped to +-20. All shapes equal; no gradient.
    """
    diff = (trainer_log_probs - rollout_log_probs).detach().double()  # k3 of 1e-5 loses its digits in float32
    clamped = diff.clamp(-20.0, 20.0)
    weight = clamped.exp()
    sums = {
        "actor/rollout_kl": token_mean(-diff, counted),
        "actor/rollout_k3": token_mean(clamped.expm1() - clamped, counted),
        MEAN_MISMATCH: token_mean(diff.abs(), counted),
        "_rollout_weight": token_mean(weight, counted),
        "_rollout_weight_squared": token_mean(weight.square(), counted),
    }
    return sums, {"actor/rollout_abs_diff_max": masked_max(diff.abs(), counted)}


def truncated_importance(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, counted: Tensor, rollout_is_threshold: float
) -> tuple[Tensor, Sums]:
    """Return, per token, min(exp(d), rollout_is_threshold), d = trainer - rollout within +-20 (TIS).

    Returns weights, without gradient, of the shape of all arguments, 1 (or the threshold, if lower) where a token does
    not count; and the sums of the mean weight and of the share of tokens where it was truncated.
    """
    diff = torch.where(counted, trainer_log_probs, 0) - torch.where(counted, rollout_log_probs, 0)
    ratio = diff.detach().clamp(-20.0, 20.0).exp()
    weights = ratio.clamp(max=rollout_is_threshold)
    sums = {
        "actor/rollout_is_mean": token_mean(weights, counted),
        "actor/rollout_is_truncated": token_mean(ratio > rollout_is_threshold, counted),
    }
    return weights, sums
