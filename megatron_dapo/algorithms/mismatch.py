"""How far the server's log-probs are from the trainer's for the same tokens, and the weights that correct it."""

import torch
from torch import Tensor

from megatron_dapo.algorithms.metrics import Maxima, Sums, masked_max, masked_sum

MEAN_MISMATCH = "actor/rollout_abs_diff"
MISMATCH_SUMS = (
    "actor/rollout_kl",
    "actor/rollout_k3",
    MEAN_MISMATCH,
    "_rollout_weight",
    "_rollout_weight_squared",
)
MISMATCH_MAXIMA = ("actor/rollout_abs_diff_max",)
TIS_SUMS = ("actor/rollout_is_mean", "actor/rollout_is_truncated")


def mismatch_sums(trainer_log_probs: Tensor, rollout_log_probs: Tensor, counted: Tensor) -> tuple[Sums, Maxima]:
    """Metric sums of d = trainer - rollout over the counted tokens, which the server drew.

    rollout_kl: k1 = -d; rollout_k3 = exp(d) - 1 - d (both estimate KL(server || trainer)); rollout_abs_diff = |d|, and
    its largest; rollout_ess (made by `finalize`): mean(w)^2 / mean(w^2) of w = exp(d), the effective share of tokens.
    In exp, d is clamped to +-20. All shapes equal; no gradient.
    """
    diff = (trainer_log_probs - rollout_log_probs).detach().double()  # k3 of 1e-5 loses its digits in float32
    clamped = diff.clamp(-20.0, 20.0)
    weight = clamped.exp()
    rows = (-diff, clamped.expm1() - clamped, diff.abs(), weight, weight.square())
    num_tokens = counted.sum(dtype=torch.float64)
    sums = {name: (masked_sum(row, counted), num_tokens) for name, row in zip(MISMATCH_SUMS, rows, strict=True)}
    return sums, {MISMATCH_MAXIMA[0]: masked_max(diff.abs(), counted)}


def truncated_importance(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, counted: Tensor, cap: float
) -> tuple[Tensor, Sums]:
    """Per token min(exp(d), cap), d = trainer - rollout within +-20: truncated importance sampling (TIS).

    Returns weights, without gradient, of the shape of all arguments, 1 (or cap, if lower) where a token does not count;
    and the sums of the mean weight and of the share of tokens where it was truncated.
    """
    diff = torch.where(counted, trainer_log_probs, 0) - torch.where(counted, rollout_log_probs, 0)
    ratio = diff.detach().clamp(-20.0, 20.0).exp()
    weights, num_tokens = ratio.clamp(max=cap), counted.sum(dtype=torch.float64)
    rows = (weights, ratio > cap)
    return weights, {name: (masked_sum(row, counted), num_tokens) for name, row in zip(TIS_SUMS, rows, strict=True)}
