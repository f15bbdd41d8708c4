"""The policy losses (clip-higher, CISPO, GSPO, SAPO, DPPO), and the loss of replayed tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dapo.algorithms.metrics import Maxima, Sums, masked_max, masked_sum, token_mean

OFF_POLICY_LOSS = "actor/off_pg_loss"
EXP_MASK_RATIO = "exp_mask_ratio"
SMALLEST_CHANCE = 1e-8


@dataclass(frozen=True)
class Clip:
    """Bounds of the policy losses: of the ratio, [1 - low, 1 + high]; a gate in their place; of the
    divergence."""

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None  # above 1: largest ratio counted for a negative advantage
    tau_pos: float = 1.0  # sapo: temperature for a positive advantage
    tau_neg: float = 1.05  # sapo: temperature for any other
    divergence: float = 0.15  # dppo_tv, dppo_kl: largest from the old policy


@dataclass(frozen=True)
class OffPolicy:
    """The loss of replayed tokens. Their old log-probs are of the policy that wrote them."""

    mode: str = "exgrpo_policy_shaping"  # of OFF_POLICY_LOSSES
    beta: float = 0.1  # of exgrpo_policy_shaping
    clip_high: float | None = None  # of dapo_clip_higher; None for the clip's own


class LossSums(NamedTuple):
    """A summed, not averaged loss (with gradient), and metric sums (without)."""

    loss_sum: Tensor
    sums: Sums
    maxima: Maxima


class _Losses(NamedTuple):
    """Losses before weights; the places of ratios cut above, cut below, and by the dual clip."""

    losses: Tensor
    is_above: Tensor
    is_below: Tensor
    is_too_bad: Tensor


def _clipped(ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Return losses before weights, and the places of the dual clip."""
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high))
    too_bad = (advantages < 0) & (ratio > (torch.inf if clip.dual is None else clip.dual))
    if clip.dual is not None:
        losses = torch.where(too_bad, -advantages * clip.dual, losses)
    return losses, too_bad


def _surrogate(log_probs: Tensor, old_log_probs: Tensor, ratio: Tensor, advantages: Tensor, clip: Clip) -> _Losses:
    losses, is_too_bad = _clipped(ratio, advantages, clip)
    is_above = (advantages > 0) & (ratio > 1.0 + clip.high)
    is_below = (advantages < 0) & (ratio < 1.0 - clip.low)
    return _Losses(losses, is_above, is_below, is_too_bad)


def _weighed_log_prob(
    log_probs: Tensor, old_log_probs: Tensor, ratio: Tensor, advantages: Tensor, clip: Clip
) -> _Losses:
    low, high = 1.0 - clip.low, 1.0 + clip.high
    weights = ratio.detach().clamp(low, high)
    return _Losses(-weights * advantages * log_probs, ratio > high, ratio < low, torch.zeros_like(weights).bool())


def _gated(log_probs: Tensor, old_log_probs: Tensor, ratio: Tensor, advantages: Tensor, clip: Clip) -> _Losses:
    tau = torch.where(advantages > 0, clip.tau_pos, torch.full_like(advantages, clip.tau_neg))
    # 1 - sigmoid(-x) = sigmoid(x): autograd keeps the derivative's digits for large ratios
    gates = (1.0 - torch.sigmoid(tau * (1.0 - ratio))) * 4.0 / tau
    nowhere = torch.zeros_like(ratio).bool()
    return _Losses(-advantages * gates, nowhere, nowhere, nowhere)


def _masked(
    log_probs: Tensor,
    old_log_probs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    clip: Clip,
    *,
    measure: Callable[[Tensor, Tensor], Tensor],
) -> _Losses:
    is_far = measure(log_probs, old_log_probs) > clip.divergence
    is_above = (advantages > 0) & (log_probs > old_log_probs) & is_far
    is_below = (advantages < 0) & (log_probs < old_log_probs) & is_far
    losses = torch.where(is_above | is_below, 0.0, -advantages * ratio)
    return _Losses(losses, is_above, is_below, torch.zeros_like(ratio).bool())


def _total_variation(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return that of the choices "this token" and "any other"."""
    return (log_probs.exp() - old_log_probs.exp()).abs()


def _binary_kl(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return KL(old policy, policy) of the same choices."""
    # a log-prob may be rounded to 0
    other, old_other = ((1.0 - x.exp()).clamp(min=SMALLEST_CHANCE) for x in (log_probs, old_log_probs))
    return old_log_probs.exp() * (old_log_probs - log_probs) + old_other * (old_other / other).log()


LOSS_FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Clip], _Losses]] = {
    "dapo": _surrogate,
    "cispo": _weighed_log_prob,
    "gspo": _surrogate,  # of another ratio
    "sapo": _gated,
    "dppo_tv": partial(_masked, measure=_total_variation),
    "dppo_kl": partial(_masked, measure=_binary_kl),
}


def _shaped(ratio: Tensor, advantages: Tensor, clip: Clip, off_policy: OffPolicy) -> Tensor:
    # r / (r + beta), in a form that keeps the derivative's digits in float32 for large r
    return -advantages / (1.0 + off_policy.beta / ratio)


def _clipped_higher(ratio: Tensor, advantages: Tensor, clip: Clip, off_policy: OffPolicy) -> Tensor:
    high = clip.high if off_policy.clip_high is None else off_policy.clip_high
    return _clipped(ratio, advantages, replace(clip, high=high))[0]


OFF_POLICY_LOSSES: dict[str, Callable[[Tensor, Tensor, Clip, OffPolicy], Tensor]] = {
    "exgrpo_policy_shaping": _shaped,
    "dapo_clip_higher": _clipped_higher,
}


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    count: Tensor,
    clip: Clip,
    *,
    kind: str = "dapo",
    sequence_log_ratio: Tensor | None = None,
    off_policy: OffPolicy | None = None,
    is_off_policy: Tensor | None = None,
    importance: Tensor | None = None,
) -> LossSums:
    """Return the sum, not the mean, of a loss of LOSS_FORMULAS: L = sum_t w_t * i_t * l_t.

        dapo: l_t = max(-A_t r_t, -A_t clip(r_t, 1 - low, 1 + high)),
        r_t = exp(clamp(lp_t - old_t, +-20)); for A_t < 0 additionally min(., -A_t * dual).
        DAPO (arXiv 2503.14476) eq. 8; dual clip arXiv 1912.09729.

        cispo: l_t = -clip(r_t, 1 - low, 1 + high) A_t lp_t, the clipped ratio without gradient.
        No dual clip. MiniMax-M1 (arXiv 2506.13585), section 3.1.

        gspo: as dapo, with s_t = exp(clamp(sequence_log_ratio_t, +-20)) in place of r_t.
        It has the gradient of lp_t. GSPO-token, arXiv 2507.18071, section 4.3: the gradient of
        GSPO if A_t and w_t are the same in a sequence.

        sapo: l_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, with tau_pos for A_t > 0, else tau_neg.
        Its derivative is that of -A_t r_t, times 4 p (1 - p), p the sigmoid: 1 at r_t = 1. No clip.
        SAPO (arXiv 2511.20347).

        dppo_tv, dppo_kl: l_t = -A_t r_t; 0 where D_t > divergence and A_t moves the chance
        p_t = exp(lp_t) further from q_t = exp(old_t): up (A_t > 0, p_t > q_t) or down (A_t < 0,
        p_t < q_t). tv: D_t = |p_t - q_t|. kl: D_t = q_t log(q_t / p_t) + (1 - q_t)
        log((1 - q_t) / (1 - p_t)). DPPO (arXiv 2602.04879), binary form.

    With off_policy, tokens with is_off_policy have another loss. exgrpo_policy_shaping: -A r / (r +
    beta) (arXiv 2510.02245). dapo_clip_higher: as dapo, with an upper bound of its own.

    Args:
        log_probs, old_log_probs, advantages: any one shape, float32 (or float64).
        weights, count: from `token_weights`. At weights of 0, exactly the uncounted tokens, neither
            values nor NaN leak and the gradient is 0.
        sequence_log_ratio: with gspo, the mean of lp - old over the counted tokens of the token's
            sequence, without gradient.
        is_off_policy: bool; None for no token.
        importance: i_t, without gradient, finite everywhere; None for 1.

    Gradient flows through log_probs only. Outside the clamp it is 0, except with cispo: there every
    token keeps its gradient. Metrics: pg_loss per `count`, everything else per counted token: see
    docs/loss.md.
    """
    counted = weights != 0
    log_probs = torch.where(counted, log_probs, 0)
    old_log_probs = torch.where(counted, old_log_probs.detach(), 0)
    log_ratio = log_probs - old_log_probs
    log_ratio = log_ratio.clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    if sequence_log_ratio is not None:
        shared = torch.where(counted, sequence_log_ratio, 0) + (log_probs - log_probs.detach())
        ratio = shared.clamp(-20.0, 20.0).exp()
    advantages = torch.where(counted, advantages, 0)

    losses, is_above, is_below, is_too_bad = LOSS_FORMULAS[kind](log_probs, old_log_probs, ratio, advantages, clip)
    on_policy = counted
    if off_policy is not None and is_off_policy is not None:
        off_policy_losses = OFF_POLICY_LOSSES[off_policy.mode](ratio, advantages, clip, off_policy)
        losses = torch.where(is_off_policy, off_policy_losses, losses)
        on_policy = counted & ~is_off_policy
    if importance is not None:
        losses = importance * losses
    weighted = weights * losses

    loss_pair = (weighted.detach().sum(dtype=torch.float64), count.double())
    own_pair = (masked_sum(weighted, on_policy), masked_sum(weights, on_policy))
    sums: Sums = {
        "actor/pg_loss": loss_pair,
        "actor/on_pg_loss": loss_pair if off_policy is None else own_pair,
        "actor/on_pg_clipfrac": token_mean(is_above, on_policy),
        "actor/on_pg_clipfrac_lower": token_mean(is_below, on_policy),
        "actor/dual_clipfrac": token_mean(is_too_bad, on_policy),
        "actor/ppo_kl": token_mean(-log_ratio, counted),
        "actor/ratio_mean": token_mean(ratio, counted),
    }
    if off_policy is not None:
        replayed = counted & ~on_policy
        sums[OFF_POLICY_LOSS] = (masked_sum(weighted, replayed), masked_sum(weights, replayed))
        sums[EXP_MASK_RATIO] = token_mean(replayed, counted)
    return LossSums(weighted.sum(), sums, {"actor/ratio_max": masked_max(ratio, counted)})
