"""The whole loss of the actor: policy loss, entropy bonus, KL loss, and every metric the actor reports."""

import functools
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megatron_dapo.algorithms.kl import FULL_KL, kl_penalty
from megatron_dapo.algorithms.metrics import Sums, token_mean
from megatron_dapo.algorithms.mismatch import mismatch_sums, truncated_importance
from megatron_dapo.algorithms.policy_loss import Clip, LossSums, OffPolicy, policy_loss

ENTROPY = "actor/entropy"
ENTROPY_SAMPLED = "actor/entropy_sampled"  # mean of -log p(token): what the entropy is for tokens drawn from the policy


@dataclass(frozen=True)
class LossConfig:
    """Which terms the loss has, and which metrics are reported."""

    clip: Clip = Clip()
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    entropy_coef: float = 0.0
    report_entropy: bool = False  # the caller computes the entropy; needed where entropy_coef is not 0
    report_mismatch: bool = True  # the batch has the server's log-probs
    off_policy: OffPolicy | None = None  # None: all tokens are on-policy
    # largest weight of truncated importance sampling (TIS) against the server's log-probs; None: no weights
    rollout_is_threshold: float | None = None

    @property
    def sends_entropy_backward(self) -> bool:
        """Return whether the loss depends on the entropy, which otherwise is at most reported beside it."""
        return self.report_entropy and self.entropy_coef != 0.0

    @property
    def use_full_kl(self) -> bool:
        """Return whether the KL loss is the one over the whole vocabulary, which the caller computes."""
        return self.use_kl_loss and self.kl_loss_type == FULL_KL


@dataclass(frozen=True, eq=False)
class TokenOutputs:
    """What the model says of the targets, with gradient; any one shape. kl: with use_full_kl."""

    log_probs: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """What is known of the targets, without gradient; the shape of the outputs, values where weights are 0 are ignored.

    weights, count: from `token_weights`. old_log_probs None: one optimizer step per rollout step, the current log-probs
    are the old ones. ref_log_probs: with use_kl_loss, unless use_full_kl. rollout_log_probs: with report_mismatch or
    rollout_is_threshold. is_current: where the old policy's own weights wrote the token; elsewhere the server's
    log-probs are older weights', which says nothing of a mismatch (None = everywhere). exp_mask: non-zero where a token
    was replayed, its old log-probs being those of the policy that wrote it; read with off_policy alone (None =
    nowhere).
    """

    weights: Tensor
    count: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    is_current: Tensor | None = None
    exp_mask: Tensor | None = None

    def select(self, index: Tensor | slice) -> "TokenBatch":
        """Return the tokens at `index` along the first axis, in every field. The count stays: of the pieces of a batch
        whose sums are added, one alone may bring it (`replace(piece, count=0)` for the others, as a tensor)."""
        per_token = (field.name for field in fields(self) if field.name != "count")
        present = {name: values for name in per_token if (values := getattr(self, name)) is not None}
        return replace(self, **{name: values[index] for name, values in present.items()})


def dapo_loss(outputs: TokenOutputs, batch: TokenBatch, config: LossConfig) -> LossSums:
    """Return sum_t w_t * (policy_t + kl_loss_coef * KL_t - entropy_coef * H_t), with metric sums.

    policy_t: `policy_loss`, with rollout_is_threshold times min(exp(old_t - rollout_t), rollout_is_threshold).

    Summed, not averaged: Megatron divides by the sum of `batch.count` over micro-batches and ranks
    (calculate_per_token_loss=True). Everything stays on the device. Where weights are 0 neither values nor NaN leak,
    and gradients are 0.
    """
    counted = batch.weights != 0
    log_probs = torch.where(counted, outputs.log_probs, 0)
    old_log_probs = log_probs if batch.old_log_probs is None else batch.old_log_probs

    importance = is_off_policy = None
    tis_sums: Sums = {}
    if config.rollout_is_threshold is not None:
        assert batch.rollout_log_probs is not None, "weights against the server need its log-probs"
        importance, tis_sums = truncated_importance(
            old_log_probs, batch.rollout_log_probs, counted, config.rollout_is_threshold
        )
    if config.off_policy is not None and batch.exp_mask is not None:
        assert batch.old_log_probs is not None, "replayed tokens need the log-probs of the policy that wrote them"
        is_off_policy = batch.exp_mask != 0
    loss_sum, sums, maxima = policy_loss(
        log_probs,
        old_log_probs,
        batch.advantages,
        batch.weights,
        batch.count,
        config.clip,
        off_policy=config.off_policy,
        is_off_policy=is_off_policy,
        importance=importance,
    )
    sums[ENTROPY_SAMPLED] = token_mean(-log_probs, counted)
    sums |= tis_sums
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
        compared = counted if batch.is_current is None else counted & batch.is_current
        mismatch, mismatch_maxima = mismatch_sums(old_log_probs, batch.rollout_log_probs, compared)
        sums = {**sums, **mismatch}
        maxima = {**maxima, **mismatch_maxima}
    sums = {"actor/loss": (loss_sum.detach().double(), batch.count.double()), **sums}
    return LossSums(loss_sum, sums, maxima)


@functools.cache
def metric_names(config: LossConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (names of the sums, names of the maxima) that every `dapo_loss` with this config returns, in order: those
    of a batch without tokens."""
    nothing = torch.zeros(0)
    batch = TokenBatch(nothing, nothing.sum(), nothing, nothing, nothing, nothing, exp_mask=nothing)
    _, sums, maxima = dapo_loss(TokenOutputs(nothing, nothing, nothing), batch, config)
    return tuple(sums), tuple(maxima)
