"""What the config makes of the loss."""

from dataclasses import replace

from megatron_dapo.algorithms.dapo_loss import LossConfig
from megatron_dapo.algorithms.policy_loss import Clip, OffPolicy
from megatron_dapo.config.derived import effective_clip, uses_experience_replay, uses_kl_loss
from megatron_dapo.config.schema import Config


def loss_config(config: Config) -> LossConfig:
    """Return the actor's loss, as `algorithms.dapo_loss` takes it."""
    actor = config.actor_rollout_ref.actor
    low, high = effective_clip(config)
    correction = config.algorithm.rollout_correction
    base = LossConfig(
        clip=Clip(low, high, actor.clip_ratio_c),
        entropy_coef=actor.entropy_coef,
        report_entropy=actor.calculate_entropy or actor.entropy_coef != 0.0,
        off_policy=_off_policy(config) if uses_experience_replay(config) else None,
        rollout_is_threshold=correction.rollout_is_threshold if correction.rollout_is == "token" else None,
    )
    if not uses_kl_loss(config):
        return base
    return replace(base, use_kl_loss=True, kl_loss_coef=actor.kl_loss_coef, kl_loss_type=actor.kl_loss_type)


def _off_policy(config: Config) -> OffPolicy:
    actor = config.actor_rollout_ref.actor
    return OffPolicy(
        mode=actor.off_policy_shaping_mode,
        beta=actor.off_policy_shaping_beta,
        clip_high=actor.off_policy_clip_ratio_high,
    )
