"""Section `algorithm`: advantages, KL in the reward, the techniques of DAPO."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_dapo.config.built_ins import ESTIMATORS, estimators_with
from megatron_dapo.config.schema.base import (
    BoundedInt,
    Fraction,
    ImportPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from megatron_dapo.config.schema.rules import ActsIf, Is, IsNot, MayChangeOnResume, WhileEnabled


class DynamicSamplingConfig(Section):
    """Groups without signal, which would train nothing, and what becomes of them."""

    enable: bool = False
    """Sample until `data.train_batch_size` groups carry signal, or mask the others."""
    filter_mode: WhileEnabled[
        Literal[
            "strict",
            "remove_all_correct",
            "remove_all_incorrect",
            "none",
            "acc",
            "score",
            "seq_reward",
            "seq_final_reward",
        ]
        | ImportPath
    ] = "strict"
    """Which groups are dropped. By raw correctness: all right or all wrong (strict), all right, all wrong, none. By a
    metric that all responses have the same of: correctness (acc), the raw reward (score), the shaped reward (seq_reward
    and seq_final_reward; a KL penalty in the reward is subtracted after groups are chosen). Or a function of your own
    (docs/extend.md)."""
    form: WhileEnabled[Literal["resample", "mask"]] = "resample"
    """What becomes of those groups: others are sampled in their place; or they stay, with advantages of 0."""
    max_num_gen_batches: WhileEnabled[BoundedInt] = 10
    """Gen batches of one rollout step before `on_exhausted` decides; 0 or less = no limit."""
    on_exhausted: WhileEnabled[Literal["raise", "train_partial"]] = "raise"
    """At the limit: stop with the counts, or train on the groups there are."""


class OverlongRewardShapingConfig(Section):
    enable: bool = False
    """Punish over-long responses."""
    buffer_len: WhileEnabled[NonNegativeInt] = 0
    """Length of the soft interval before `max_response_length` (DAPO eq. 13); 0 = `truncation_penalty` instead."""
    expected_len: WhileEnabled[Annotated[PositiveInt | None, ActsIf(IsNot("buffer_len", 0))]] = None
    """Response length without punishment; null = max_response_length - buffer_len."""
    penalty_factor: WhileEnabled[Annotated[NonNegativeFloat, ActsIf(IsNot("buffer_len", 0))]] = 1.0
    """Punishment at the end of the soft interval."""
    truncation_penalty: WhileEnabled[Annotated[float, ActsIf(Is("buffer_len", 0))]] = -0.5
    """Punishment of a truncated response."""
    soft_penalty_mode: WhileEnabled[
        Annotated[Literal["additive", "multiplicative", "replace_if_positive", "cap"], ActsIf(Is("buffer_len", 0))]
    ] = "additive"
    """How `truncation_penalty` acts on the reward, see docs/algorithms.md."""
    filter_truncated: WhileEnabled[bool] = False
    """Overlong filtering: give the tokens of truncated responses no loss."""


class KLControlConfig(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    """Constant coefficient, or one steered towards `target_kl` (arXiv 1909.08593)."""
    kl_coef: Annotated[NonNegativeFloat, ActsIf(Is("algorithm.use_kl_in_reward", True, None))] = 0.0
    """Coefficient of the KL penalty in the reward (its start value if adaptive)."""
    target_kl: Annotated[PositiveFloat, ActsIf(Is("type", "adaptive"))] = 0.01
    """KL the adaptive controller aims at."""
    horizon: Annotated[PositiveInt, ActsIf(Is("type", "adaptive"))] = 10000
    """Samples over which the adaptive controller acts."""


class RolloutCorrectionConfig(Section):
    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Weigh the policy loss by exp(old - server's log-prob) of each token, or by its product over the response; see
    docs/loss.md."""
    rollout_is_threshold: Annotated[PositiveFloat | str, ActsIf(Is("rollout_is", "token", "sequence"))] = 2.0
    """Largest weight of `rollout_is`, at least 1 (truncation, TIS); or lower_upper, such as 0.5_5.0: outside, the
    weight is 0 (IcePop)."""
    rollout_rs: Literal["none", "token_k1", "seq_mean_k1", "seq_mean_k3"] = "none"
    """Reject tokens whose ratio exp(old - server's log-prob), or responses the geometric mean of whose ratios (k1) or
    whose mean k3, is out of `rollout_rs_threshold`: they give no gradient, the count stays."""
    rollout_rs_threshold: Annotated[PositiveFloat | str | None, ActsIf(IsNot("rollout_rs", "none"))] = None
    """Bounds lower_upper of a ratio, such as 0.999_1.001, or its upper bound x (the lower one is 1/x); of seq_mean_k3
    the upper bound."""
    rollout_token_veto_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Reject responses with a token whose ratio is below this, such as 1e-4; null = none."""
    bypass_mode: bool = False
    """Take the servers' log-probs for the old ones: nothing is weighed, and the pass that computes old log-probs is
    saved. Where it is, max_mismatch looks at the first mini-batch alone."""
    max_mismatch: MayChangeOnResume[PositiveFloat | None] = 0.5
    """Largest mean |server's - trainer's log-prob| of a step that is trained on: above, the run is saved and stops, and
    names the servers (exit code 15). bf16 makes 0.01, another model 1 or more; null = off. With max_staleness above 0
    older weights' tokens count too, and what the weights have changed since."""


class AlgorithmConfig(Section):
    adv_estimator: Literal[*ESTIMATORS] | ImportPath = "grpo"  # type: ignore[valid-type]
    """Advantage estimator, per token or per response (docs/algorithms.md), or your own function (docs/extend.md)."""
    gamma: Annotated[Fraction, ActsIf(Is("adv_estimator", *estimators_with(discounts=True)))] = 1.0
    """Discount per token."""
    lam: Annotated[Fraction, ActsIf(Is("adv_estimator", *estimators_with(needs_critic=True)))] = 1.0
    """Lambda: 1 = what was earned minus the value, 0 = one-step errors (arXiv 1506.02438)."""
    norm_adv_by_std_in_grpo: Annotated[bool, ActsIf(Is("adv_estimator", *estimators_with(divides_by_std=True)))] = True
    """Divide by the group's standard deviation (false = Dr. GRPO)."""
    use_kl_in_reward: bool | None = None
    """Subtract kl_ctrl.kl_coef * KL(actor, reference) from the rewards; null = where kl_ctrl.kl_coef is above 0."""
    kl_penalty: Annotated[
        Literal["kl", "abs", "mse", "low_var_kl", "full"],
        ActsIf(IsNot("algorithm.kl_ctrl.kl_coef", 0.0), Is("use_kl_in_reward", True)),
    ] = "kl"
    """KL estimator of the penalty in the reward; full = the KL itself, over the whole vocabulary."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    overlong_reward_shaping: OverlongRewardShapingConfig = OverlongRewardShapingConfig()
