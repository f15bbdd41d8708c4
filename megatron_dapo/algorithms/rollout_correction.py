"""Importance weights and rejection for tokens not written exactly by the old policy.

mu: the server's log-prob of a token, by any weights. old: the trainer's before the update. They
differ because servers round otherwise, and because tokens may be some weight versions old. d = old
- mu within +-20.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dapo.algorithms.metrics import Sums, token_mean

LARGEST_LOG_RATIO = 20.0


class RatioBounds(NamedTuple):
    """Bounds of a ratio.

    Without `low`, a ratio above `high` becomes `high` (truncation). With `low`, a ratio outside
    [low, high] becomes 0 (IcePop, arXiv 2510.18855).
    """

    low: float | None
    high: float


@dataclass(frozen=True)
class RolloutCorrection:
    """A step's computation from the old log-probs and the server's."""

    rollout_is: str = "none"  # of LOG_RATIOS, or "none"
    rollout_is_bounds: RatioBounds = RatioBounds(None, 2.0)
    rollout_rs: str = "none"  # of REJECTIONS, or "none"
    rollout_rs_bounds: RatioBounds = RatioBounds(None, torch.inf)
    """Bounds of the number looked at; low None: no lower bound."""
    token_veto: float | None = None
    """A sequence with a token of a smaller ratio is rejected."""

    @property
    def rejects(self) -> bool:
        """Return whether tokens can be rejected."""
        return self.rollout_rs != "none" or self.token_veto is not None


class Segments:
    """Sums over the counted tokens of each sequence.

    Nothing is read back from the device. No order of additions changes from run to run, unlike a
    scatter's on a GPU.
    """

    def __init__(self, counted: Tensor, segment_ids: Tensor, num_segments: int) -> None:
        self._counted = counted
        self._ids = segment_ids
        flat = segment_ids.reshape(-1)
        self._widths = torch.zeros(num_segments, dtype=torch.int64, device=flat.device)
        self._widths.scatter_add_(0, flat, torch.ones_like(flat))
        self.lengths = self.sum(torch.ones_like(counted, dtype=torch.float64))

    def sum(self, values: Tensor) -> Tensor:
        """Return [num_segments] float64: sums over counted tokens of values, of the tokens'
        shape."""
        flat = torch.where(self._counted, values, 0).double().reshape(-1)
        return torch.segment_reduce(flat, "sum", lengths=self._widths, unsafe=True)

    def mean(self, values: Tensor) -> Tensor:
        """Return the same over the number of counted tokens; NaN in a sequence without any."""
        return self.sum(values) / self.lengths

    def spread(self, of_segments: Tensor) -> Tensor:
        """Return the value of each token's sequence, in the shape of the tokens."""
        return of_segments[self._ids]


# rollout_is -> log of the ratio of each token, from d
LOG_RATIOS: dict[str, Callable[[Tensor, Segments], Tensor]] = {
    "token": lambda diff, segments: diff,
    "sequence": lambda diff, segments: segments.spread(segments.sum(diff)),
}
# rollout_rs -> number looked at, of each token: a ratio (k1), or an estimate of a KL (k3)
REJECTIONS: dict[str, Callable[[Tensor, Segments], Tensor]] = {
    "token_k1": lambda diff, segments: diff.exp(),
    "seq_mean_k1": lambda diff, segments: segments.spread(segments.mean(diff).exp()),
    "seq_mean_k3": lambda diff, segments: segments.spread(segments.mean(diff.expm1() - diff)),
}


class Corrected(NamedTuple):
    """importance: factor of each token's policy loss, without gradient; 0 for a rejected token."""

    importance: Tensor
    sums: Sums


def rollout_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    config: RolloutCorrection,
) -> Corrected:
    """Return importance_t = keep_t * weight_t of every token, and metric sums.

    weight_t, by rollout_is:
        token: bounded(exp d_t). Truncated: https://fengyao.notion.site/off-policy-rl.
        sequence: bounded(exp clamp(sum d, +-20)) over the counted tokens of the sequence.
            https://richardli.xyz/rl-collapse-2.
        none: 1.

    keep_t, by rollout_rs (arXiv 2512.23075; https://richardli.xyz/rl-collapse-3):
        token_k1: low <= exp d_t <= high.
        seq_mean_k1: low <= exp mean(d) <= high, the geometric mean of the sequence's ratios.
        seq_mean_k3: mean(exp d - 1 - d) <= high.

    Further, with token_veto, exp d >= token_veto for every token of the sequence.

    The loss's count stays the number of all tokens. If it were smaller, rejection would enlarge the
    steps of the remaining tokens.

    All tensors have one shape. Values at a loss_mask of 0 are ignored, even NaN, and have
    importance 1. segment_ids ascend from 0 in the tensors' order, one per sequence; sequences lie
    whole in the tensors. Computed in float64, the result has the dtype of old_log_probs.
    """
    counted = loss_mask != 0
    diff = log_difference(old_log_probs.double(), rollout_log_probs.double(), counted)
    segments = Segments(counted, segment_ids, num_segments)
    weights = torch.ones_like(diff)
    sums: Sums = {}
    if config.rollout_is != "none":
        log_ratio = LOG_RATIOS[config.rollout_is](diff, segments).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        weights, sums = _bounded(log_ratio.exp(), counted, config.rollout_is_bounds)
    if config.rejects:
        keep, rejection_sums = _kept(diff, counted, segments, config)
        weights = torch.where(keep, weights, 0)
        sums = {**sums, **rejection_sums}
    return Corrected(torch.where(counted, weights, 1).to(old_log_probs.dtype), sums)


def token_importance(
    old_log_probs: Tensor, rollout_log_probs: Tensor, counted: Tensor, bounds: RatioBounds
) -> tuple[Tensor, Sums]:
    """Return weight_t of `rollout_is: token` and its metric sums, for the loss itself.

    The loss computes them with one optimizer step per rollout step: the current log-probs are the
    old ones. For an uncounted token, d is 0.
    """
    diff = log_difference(old_log_probs, rollout_log_probs, counted)
    return _bounded(diff.exp(), counted, bounds)


def log_difference(old_log_probs: Tensor, rollout_log_probs: Tensor, counted: Tensor) -> Tensor:
    """Return d, without gradient; 0 for an uncounted token."""
    diff = torch.where(counted, old_log_probs, 0) - torch.where(counted, rollout_log_probs, 0)
    return diff.detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def _bounded(ratio: Tensor, counted: Tensor, bounds: RatioBounds) -> tuple[Tensor, Sums]:
    """Return the ratio within the bounds, and two sums: its mean, the share of tokens outside."""
    low, high = bounds
    if low is None:
        is_outside = ratio > high
        weights = ratio.clamp(max=high)
    else:
        is_outside = (ratio < low) | (ratio > high)
        weights = torch.where(is_outside, 0, ratio)
    return weights, {
        "actor/rollout_is_mean": token_mean(weights, counted),
        "actor/rollout_is_truncated": token_mean(is_outside, counted),
    }


def _kept(diff: Tensor, counted: Tensor, segments: Segments, config: RolloutCorrection) -> tuple[Tensor, Sums]:
    """Return the mask of kept tokens, and sums of two shares: rejected tokens and lost sequences.

    A lost sequence has no kept token.
    """
    keep = torch.ones_like(counted)
    if config.rollout_rs != "none":
        looked_at = REJECTIONS[config.rollout_rs](diff, segments)
        low, high = config.rollout_rs_bounds
        keep = looked_at <= high
        if low is not None:
            keep = keep & (looked_at >= low)
    if config.token_veto is not None:
        keep = keep & (segments.spread(segments.sum(diff.exp() < config.token_veto)) == 0)
    has_tokens = segments.lengths > 0
    is_gone = has_tokens & (segments.sum(keep) == 0)
    return keep, {
        "actor/rollout_rs_token_masked": token_mean(~keep, counted),
        "actor/rollout_rs_seq_masked": token_mean(is_gone, has_tokens),
    }
