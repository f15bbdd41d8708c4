"""How the tokens of a batch are weighed that not exactly the old policy wrote: importance weights and rejection.

mu: the server's log-prob of a token, by whichever weights wrote it. old: the trainer's before the update. Both differ
because servers round otherwise, and because tokens may be some weight versions old. d = old - mu within +-20.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dapo.algorithms.metrics import Sums, token_mean

LARGEST_LOG_RATIO = 20.0


class RatioBounds(NamedTuple):
    """What becomes of a ratio that is out of bounds. Without `low` one above `high` becomes `high` (truncation); with
    `low` one outside [low, high] becomes 0 (IcePop, arXiv 2510.18855)."""

    low: float | None
    high: float


@dataclass(frozen=True)
class RolloutCorrection:
    """What a step computes of the old log-probs and the server's.

    rollout_is: of LOG_RATIOS, or "none". rollout_rs: of REJECTIONS, or "none"; what it looks at must lie in
    rollout_rs_bounds (low None: no lower bound). token_veto: a sequence with a token of a smaller ratio is rejected.
    """

    rollout_is: str = "none"
    rollout_is_bounds: RatioBounds = RatioBounds(None, 2.0)
    rollout_rs: str = "none"
    rollout_rs_bounds: RatioBounds = RatioBounds(None, torch.inf)
    token_veto: float | None = None

    @property
    def rejects(self) -> bool:
        """Return whether tokens can be rejected."""
        return self.rollout_rs != "none" or self.token_veto is not None


class Segments:
    """Sums over the counted tokens of each sequence. Nothing is read back from the device, and no order of additions
    changes from run to run, as that of a scatter would on a GPU."""

    def __init__(self, counted: Tensor, segment_ids: Tensor, num_segments: int) -> None:
        self._counted = counted
        self._ids = segment_ids
        flat = segment_ids.reshape(-1)
        self._widths = torch.zeros(num_segments, dtype=torch.int64, device=flat.device)
        self._widths.scatter_add_(0, flat, torch.ones_like(flat))
        self.lengths = self.sum(torch.ones_like(counted, dtype=torch.float64))

    def sum(self, values: Tensor) -> Tensor:
        """Return [num_segments] float64: sums of values, of the shape of the tokens, where they count."""
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
# rollout_rs -> what is looked at, of each token: a ratio (k1), or an estimate of a KL (k3)
REJECTIONS: dict[str, Callable[[Tensor, Segments], Tensor]] = {
    "token_k1": lambda diff, segments: diff.exp(),
    "seq_mean_k1": lambda diff, segments: segments.spread(segments.mean(diff).exp()),
    "seq_mean_k3": lambda diff, segments: segments.spread(segments.mean(diff.expm1() - diff)),
}


class Corrected(NamedTuple):
    """importance: what the policy loss of each token is multiplied by, without gradient; 0 where it is rejected."""

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

    weight_t, rollout_is token: bounded(exp d_t); sequence: bounded(exp clamp(sum d, +-20)) over the counted tokens of
    the sequence; none: 1.      Truncated: https://fengyao.notion.site/off-policy-rl, of sequences https://richardli.xyz/rl-collapse-2.
    keep_t, rollout_rs token_k1: low <= exp d_t <= high; seq_mean_k1: low <= exp mean(d) <= high, the geometric mean of
    the sequence's ratios; seq_mean_k3: mean(exp d - 1 - d) <= high. Further, with token_veto, exp d >= token_veto for
    every token of the sequence.                            (arXiv 2512.23075; https://richardli.xyz/rl-collapse-3)

    The count that the loss is divided by stays that of all tokens: were it smaller, rejection would make the steps of
    those that are left larger.

    All tensors have one shape; what stands where loss_mask is 0 is ignored, even NaN, and has importance 1. segment_ids
    ascend from 0 in the tensors' order, one per sequence; sequences lie whole in the tensors. Computed in float64, the
    result has the dtype of old_log_probs.
    """
    counted = loss_mask != 0
    diff = log_difference(old_log_probs.double(), rollout_log_probs.double(), counted)
    segments = Segments(counted, segment_ids, num_segments)
    weights = torch.ones_like(diff)
    sums: Sums = {}
    if config.rollout_is != "none":
        log_ratio = LOG_RATIOS[config.rollout_is](diff, segments).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        weights, sums = bounded(log_ratio.exp(), counted, config.rollout_is_bounds)
    if config.rejects:
        keep, rejection_sums = _kept(diff, counted, segments, config)
        weights = torch.where(keep, weights, 0)
        sums = {**sums, **rejection_sums}
    return Corrected(torch.where(counted, weights, 1).to(old_log_probs.dtype), sums)


def token_importance(
    old_log_probs: Tensor, rollout_log_probs: Tensor, counted: Tensor, bounds: RatioBounds
) -> tuple[Tensor, Sums]:
    """Return weight_t of `rollout_is: token` and its metric sums where the loss itself computes them: with one
    optimizer step per rollout step, where the current log-probs are the old ones. Where a token does not count, d is 0.
    """
    diff = log_difference(old_log_probs, rollout_log_probs, counted)
    return bounded(diff.exp(), counted, bounds)


def log_difference(old_log_probs: Tensor, rollout_log_probs: Tensor, counted: Tensor) -> Tensor:
    """Return d, without gradient; 0 where a token does not count."""
    diff = torch.where(counted, old_log_probs, 0) - torch.where(counted, rollout_log_probs, 0)
    return diff.detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def bounded(ratio: Tensor, counted: Tensor, bounds: RatioBounds) -> tuple[Tensor, Sums]:
    """Return the ratio within the bounds, and the sums of its mean and of the share of tokens where it was not."""
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
    """Return which tokens are not rejected, and the sums of the shares of those that are, and of the sequences of which
    nothing is left."""
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
