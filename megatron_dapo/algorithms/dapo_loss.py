"""The whole loss of the actor: policy loss, entropy bonus, KL loss, and the actor's metrics."""

import functools
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megatron_dapo.algorithms.kl import FULL_KL, kl_penalty
from megatron_dapo.algorithms.metrics import Sums, token_mean
from megatron_dapo.algorithms.mismatch_sums import mismatch_sums
from megatron_dapo.algorithms.policy_loss import Clip, LossSums, OffPolicy, policy_loss
from megatron_dapo.algorithms.rollout_correction import RatioBounds, token_importance

LOSS = "actor/loss"
ENTROPY = "actor/entropy"
# Mean of -log p(token), an estimate of the entropy from tokens drawn from the policy.
ENTROPY_SAMPLED = "actor/entropy_sampled"


@dataclass(frozen=True)
class LossConfig:
    """The terms of the loss, and the reported metrics."""

    clip: Clip = Clip()
    policy_loss: str = "dapo"  # of LOSS_FORMULAS
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    entropy_coef: float = 0.0
    report_entropy: bool = False  # the caller computes it; needed for entropy_coef != 0
    report_mismatch: bool = True  # the batch has the server's log-probs
    report_stale: bool = False  # also of tokens of older weights, and of all; with report_mismatch
    off_policy: OffPolicy | None = None  # None: all tokens are on-policy
    # Bounds of importance sampling against the server's log-probs, computed by the loss: see
    # `RatioBounds`. Largest weight, or None for no such weights; IcePop's lower bound, or None for
    # truncation.
    rollout_is_threshold: float | None = None
    rollout_is_threshold_lower: float | None = None
    # old_log_probs are the server's; the current log-probs are compared with them
    bypass_mode: bool = False

    @property
    def is_over_sequences(self) -> bool:
        """Return whether the ratio is of whole sequences, from `TokenBatch.sequence_log_ratio`."""
        return self.policy_loss == "gspo"

    @property
    def sends_entropy_backward(self) -> bool:
        """Return whether the loss depends on the entropy; otherwise it is at most reported."""
        return self.report_entropy and self.entropy_coef != 0.0

    @property
    def use_full_kl(self) -> bool:
        """Return whether the KL loss is over the whole vocabulary, computed by the caller."""
        return self.use_kl_loss and self.kl_loss_type == FULL_KL


@dataclass(frozen=True, eq=False)
class TokenOutputs:
    """The model's outputs for the targets, with gradient; any one shape. kl: with use_full_kl."""

    log_probs: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """The data of the targets, without gradient, in the shape of the outputs.

    Values at weights of 0 are ignored.
    """

    weights: Tensor
    """From `token_weights`."""
    count: Tensor
    """From `token_weights`."""
    advantages: Tensor
    old_log_probs: Tensor | None = None
    """None with one optimizer step per rollout step: the current log-probs are the old ones."""
    ref_log_probs: Tensor | None = None
    """With use_kl_loss, unless use_full_kl."""
    rollout_log_probs: Tensor | None = None
    """With report_mismatch or rollout_is_threshold."""
    is_current: Tensor | None = None
    """True at tokens written by the old policy's own weights; None for all tokens.

    At other tokens the server's log-probs are older weights', and say nothing of a mismatch.
    """
    is_stale: Tensor | None = None
    """True at tokens written by older weights, replayed ones excluded; None for no token.

    Read only with report_stale.
    """
    importance: Tensor | None = None
    """From `rollout_correction`: factor of each token's policy loss.

    None for 1, or for the weights by rollout_is_threshold.
    """
    exp_mask: Tensor | None = None
    """Non-zero at replayed tokens; None for no token. Read only with off_policy.

    Their old log-probs are of the policy that wrote them.
    """
    sequence_log_ratio: Tensor | None = None
    """With is_over_sequences: the sequence's mean of log-prob - old log-prob at counted tokens."""

    def select(self, index: Tensor | slice) -> "TokenBatch":
        """Return the tokens at `index` along the first axis, in every field.

        The count stays. If the sums of a batch's pieces are added, only one may bring it; use
        `replace(piece, count=0)` for the others, with a tensor.
        """
        per_token = (field.name for field in fields(self) if field.name != "count")
        present = {name: values for name in per_token if (values := getattr(self, name)) is not None}
        return replace(self, **{name: values[index] for name, values in present.items()})


def dapo_loss(outputs: TokenOutputs, batch: TokenBatch, config: LossConfig) -> LossSums:
    """Return sum_t w_t * (policy_t + kl_loss_coef * KL_t - entropy_coef * H_t), with metric sums.

    policy_t: `policy_loss`, times importance_t if given. With rollout_is_threshold, importance_t is
    `token_importance` of old_t - rollout_t.

    Summed, not averaged: Megatron divides by the sum of `batch.count` over micro-batches and ranks
    (calculate_per_token_loss=True). Everything stays on the device. At weights of 0 neither values
    nor NaN leak, and gradients are 0.
    """
    counted = batch.weights != 0
    log_probs = torch.where(counted, outputs.log_probs, 0)
    old_log_probs = log_probs if batch.old_log_probs is None else batch.old_log_probs

    importance = None if batch.importance is None else torch.where(counted, batch.importance.detach(), 0)
    is_off_policy = None
    importance_sums: Sums = {}
    if config.rollout_is_threshold is not None:
        assert batch.rollout_log_probs is not None, "weights against the server need its log-probs"
        assert importance is None, "tokens are weighed once"
        bounds = RatioBounds(config.rollout_is_threshold_lower, config.rollout_is_threshold)
        importance, importance_sums = token_importance(old_log_probs, batch.rollout_log_probs, counted, bounds)
    if config.off_policy is not None and batch.exp_mask is not None:
        assert batch.old_log_probs is not None, "replayed tokens need the log-probs of the policy that wrote them"
        is_off_policy = batch.exp_mask != 0
    if config.is_over_sequences:
        assert batch.sequence_log_ratio is not None, "a ratio of whole sequences needs the mean of their log-ratios"
    loss_sum, sums, maxima = policy_loss(
        log_probs,
        old_log_probs,
        batch.advantages,
        batch.weights,
        batch.count,
        config.clip,
        kind=config.policy_loss,
        sequence_log_ratio=batch.sequence_log_ratio if config.is_over_sequences else None,
        off_policy=config.off_policy,
        is_off_policy=is_off_policy,
        importance=importance,
    )
    sums[ENTROPY_SAMPLED] = token_mean(-log_probs, counted)
    sums |= importance_sums
    if config.report_entropy:
        assert outputs.entropy is not None, "the caller computes the entropy that is reported"
        entropy = torch.where(counted, outputs.entropy, 0)
        loss_sum = loss_sum - config.entropy_coef * (batch.weights * entropy).sum()
        sums[ENTROPY] = token_mean(entropy, counted)
    if config.use_kl_loss:
        if config.use_full_kl:
            assert outputs.kl is not None, "the caller computes the KL over the whole vocabulary"
            kl = torch.where(counted, outputs.kl, 0)
        else:
            assert batch.ref_log_probs is not None, "a KL loss needs the reference's log-probs"
            kl = kl_penalty(config.kl_loss_type, log_probs, torch.where(counted, batch.ref_log_probs, 0))
        loss_sum = loss_sum + config.kl_loss_coef * (batch.weights * kl).sum()
        sums["actor/kl_loss"] = ((batch.weights * kl).detach().sum(dtype=torch.float64), batch.count.double())
    if config.report_mismatch:
        assert batch.rollout_log_probs is not None, "the comparison with the server needs its log-probs"
        trainer_log_probs = log_probs if config.bypass_mode else old_log_probs
        compared = counted if batch.is_current is None else counted & batch.is_current
        stale = None
        if config.report_stale:
            stale = torch.zeros_like(counted) if batch.is_stale is None else counted & batch.is_stale
        mismatch, mismatch_maxima = mismatch_sums(trainer_log_probs, batch.rollout_log_probs, compared, stale)
        sums = {**sums, **mismatch}
        maxima = {**maxima, **mismatch_maxima}
    sums = {LOSS: (loss_sum.detach().double(), batch.count.double()), **sums}
    return LossSums(loss_sum, sums, maxima)


@functools.cache
def metric_names(config: LossConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names (of sums, of maxima) of every `dapo_loss` with this config, in order.

    They come from a batch without tokens.
    """
    nothing = torch.zeros(0)
    batch = TokenBatch(
        nothing, nothing.sum(), nothing, nothing, nothing, nothing, exp_mask=nothing, sequence_log_ratio=nothing
    )
    _, sums, maxima = dapo_loss(TokenOutputs(nothing, nothing, nothing), batch, config)
    return tuple(sums), tuple(maxima)
