"""Makes the loss's settings from the config."""

from dataclasses import replace

from megatron_dapo.algorithms.dapo_loss import LossConfig
from megatron_dapo.algorithms.policy_loss import Clip, OffPolicy
from megatron_dapo.algorithms.rollout_correction import RatioBounds, RolloutCorrection
from megatron_dapo.config.built_ins import POLICY_LOSSES
from megatron_dapo.config.derived import effective_clip, needs_old_log_probs, uses_experience_replay, uses_kl_loss
from megatron_dapo.config.ratio_bounds import ratio_bounds, rejection_bounds
from megatron_dapo.config.schema.config import Config


def loss_config(config: Config) -> LossConfig:
    """Return the actor's loss, as `algorithms.dapo_loss` takes it."""
    actor = config.actor_rollout_ref.actor
    if config.sft.enable:
        return _log_likelihood(actor.calculate_entropy)
    correction = config.algorithm.rollout_correction
    loss_corrects = correction.rollout_is != "none" and correction_per_step(config) is None
    bounds = ratio_bounds(correction.rollout_is_threshold)
    base = LossConfig(
        clip=_clip(config),
        policy_loss=actor.policy_loss,
        entropy_coef=actor.entropy_coef,
        report_entropy=actor.calculate_entropy or actor.entropy_coef != 0.0,
        off_policy=_off_policy(config) if uses_experience_replay(config) else None,
        report_stale=config.actor_rollout_ref.rollout.max_staleness > 0,
        rollout_is_threshold=bounds.high if loss_corrects else None,
        rollout_is_threshold_lower=bounds.low if loss_corrects else None,
        bypass_mode=correction.bypass_mode,
    )
    if not uses_kl_loss(config):
        return base
    return replace(base, use_kl_loss=True, kl_loss_coef=actor.kl_loss_coef, kl_loss_type=actor.kl_loss_type)


def _clip(config: Config) -> Clip:
    actor = config.actor_rollout_ref.actor
    row = POLICY_LOSSES[actor.policy_loss]
    low, high = effective_clip(config)
    dual = actor.clip_ratio_c if row.clips_surrogate else None
    return Clip(low, high, dual, actor.tau_pos, actor.tau_neg, actor.dppo_threshold or row.divergence)


def _log_likelihood(report_entropy: bool) -> LossConfig:
    """Return -log-prob of each token, as a case of cispo.

    Its advantages are 1, and the policy is its own old policy, so that the ratio is 1 and meets no
    bound. The fused head computes it in one pass, like every sum over tokens.
    """
    return LossConfig(
        clip=Clip(low=1.0, high=1.0), policy_loss="cispo", report_entropy=report_entropy, report_mismatch=False
    )


def correction_per_step(config: Config) -> RolloutCorrection | None:
    """Return the correction of token weights before the update, or None.

    None if there is no correction, or if the loss applies it: a weight per token, with the current
    log-probs in place of old ones.
    """
    section = config.algorithm.rollout_correction
    correction = RolloutCorrection(
        rollout_is=section.rollout_is,
        rollout_is_bounds=RatioBounds(*ratio_bounds(section.rollout_is_threshold)),
        rollout_rs=section.rollout_rs,
        rollout_rs_bounds=RatioBounds(*rejection_bounds(section)),
        token_veto=section.rollout_token_veto_threshold,
    )
    does_nothing = correction.rollout_is == "none" and not correction.rejects
    return None if does_nothing or not needs_old_log_probs(config) else correction


def _off_policy(config: Config) -> OffPolicy:
    actor = config.actor_rollout_ref.actor
    return OffPolicy(
        mode=actor.off_policy_shaping_mode,
        beta=actor.off_policy_shaping_beta,
        clip_high=actor.off_policy_clip_ratio_high,
    )
