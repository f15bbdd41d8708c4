"""Checks across the algorithm's keys: clipping, DAPO's techniques, KL, estimators, replay.

Settings of a technique with its switch off are a mistake (here, or in `unused_keys`):
silently-off techniques are how published recipes fail.
"""

from collections.abc import Iterator

from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.checks.length_checks import longest_in_words
from megatron_dapo.config.built_ins import POLICY_LOSSES, estimators_with, policy_losses_with
from megatron_dapo.config.derived import (
    advantage_estimator,
    clip_keys,
    effective_clip,
    gen_batch_size,
    longest_sample,
    needs_old_log_probs,
    needs_reference,
    replaces_groups,
    uses_dynamic_sampling,
    uses_experience_replay,
    uses_kl_in_reward,
)
from megatron_dapo.config.key_names import (
    ACTOR,
    CORRECTION,
    ESTIMATOR,
    KL_CTRL,
    LOSS_FUNCTION,
    OVERLONG,
    POLICY_LOSS,
    REPLAY,
    ROLLOUT,
    ROUTER_REPLAY,
    SAMPLING,
    USE_DAPO,
    N,
)
from megatron_dapo.config.keys import known_keys, show_text, value_of
from megatron_dapo.config.schema.config import Config


def _gen_batches(config: Config) -> Iterator[str]:
    size = config.data.train_batch_size
    prompts = gen_batch_size(config)
    sampling = config.algorithm.dynamic_sampling
    if prompts != size and not uses_dynamic_sampling(config):
        yield (
            f"data.gen_batch_size is {prompts}, but has no effect while nothing is filtered: with dynamic sampling "
            f"off a step is one gen batch of data.train_batch_size {size}; set it to null, or enable {SAMPLING} "
            f"with a filter_mode other than none."
        )
    elif prompts != size and sampling.form == "mask":
        yield (
            f"data.gen_batch_size is {prompts}, but with {SAMPLING}.form mask a step is one gen batch of "
            f"data.train_batch_size {size}; set gen_batch_size to null, or form to resample."
        )
    elif replaces_groups(config) and 0 < sampling.max_num_gen_batches * prompts < size:
        yield (
            f"data.gen_batch_size {prompts} x {SAMPLING}.max_num_gen_batches {sampling.max_num_gen_batches} prompts "
            f"can never fill data.train_batch_size {size}; raise one of the first two."
        )


def _masking(config: Config) -> Iterator[str]:
    sampling = config.algorithm.dynamic_sampling
    if sampling.enable and sampling.form == "mask" and sampling.filter_mode == "none":
        yield (
            f"{SAMPLING}.form is mask, but {SAMPLING}.filter_mode is none, so that there is nothing to mask; choose "
            f"another filter_mode, or set form to resample."
        )


def _group_size(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.n > 1 or not uses_dynamic_sampling(config):
        return
    yield (
        f"{N} is 1, but {SAMPLING}.enable is true, which compares the responses of a group; set n to 2 or more, or "
        f"enable to false."
    )


def is_corrected(config: Config) -> bool:
    """Return whether the loss knows the servers' log-probs. A veto by itself is no correction:
    nearly all samples pass it unchanged."""
    correction = config.algorithm.rollout_correction
    # the function gets rollout_log_probs
    corrects_itself = config.actor_rollout_ref.actor.loss_function is not None
    corrects = correction.rollout_is != "none" or correction.bypass_mode or correction.rollout_rs != "none"
    return corrects or corrects_itself


def staleness(config: Config) -> Iterator[str]:
    """Refuse samples of earlier weights without a correction: their log-probs would count as old
    ones."""
    max_staleness = config.actor_rollout_ref.rollout.max_staleness
    if max_staleness and not is_corrected(config):
        yield (
            f"{ROLLOUT}.max_staleness is {max_staleness}, but {CORRECTION}.rollout_is is none, so that groups of "
            f"earlier weights would be trained on as if the current ones had written them; set rollout_is to token, or "
            f"rollout_rs, or bypass_mode, or max_staleness to 0."
        )


def _slots(config: Config) -> Iterator[str]:
    """Refuse requests waiting inside a server: a weight push puts the running ones behind them."""
    rollout = config.actor_rollout_ref.rollout
    limit = rollout.server.max_running_requests
    if rollout.max_staleness and limit is not None and rollout.max_concurrency > limit:
        yield (
            f"{ROLLOUT}.max_concurrency is {rollout.max_concurrency}, but a server decodes "
            f"{ROLLOUT}.server.max_running_requests {limit} at once, and with max_staleness {rollout.max_staleness} "
            f"none may wait inside it; set max_concurrency to {limit} or less."
        )


def _clips_surrogate(config: Config) -> bool:
    return POLICY_LOSSES[config.actor_rollout_ref.actor.policy_loss].clips_surrogate


def _clips_weight(config: Config) -> bool:
    """Return whether the ratio is clipped at any advantage; CISPO's paper has no lower bound."""
    return POLICY_LOSSES[config.actor_rollout_ref.actor.policy_loss].clips_weight


def _lower_clip(config: Config) -> Iterator[str]:
    low, _ = effective_clip(config)
    low_key, _ = clip_keys(config)
    if low > 1.0 and _clips_weight(config):
        yield (
            f"{low_key} is {low:g}, but must be at most 1, which is no lower bound: the ratio of two probabilities is "
            f"never negative."
        )
    if low >= 1.0 and _clips_surrogate(config):
        yield f"{low_key} is {low:g}, but must be below 1: the ratio of two probabilities is never negative."


def _upper_clip(config: Config) -> Iterator[str]:
    low, high = effective_clip(config)
    low_key, _ = clip_keys(config)
    if high < low and _clips_surrogate(config):
        yield (
            f"{ACTOR}.clip_ratio_high is {high:g}, below {low_key.rpartition('.')[2]} {low:g}; clip-higher widens the "
            f"upper side: set clip_ratio_high to that or more."
        )


def _dual_clip(config: Config) -> Iterator[str]:
    bound = config.actor_rollout_ref.actor.clip_ratio_c
    _, high = effective_clip(config)
    if bound is not None and bound <= 1.0 + high and _clips_surrogate(config):
        yield (
            f"{ACTOR}.clip_ratio_c is {bound:g}, inside the clip range that ends at {1.0 + high:g}; "
            f"set it above that, or to null for no dual clip."
        )


def _bounds_of_papers(config: Config) -> Iterator[str]:
    """Yield a mistake for DAPO's symmetric range under another loss."""
    actor = config.actor_rollout_ref.actor
    bounds = POLICY_LOSSES[actor.policy_loss].bounds
    if bounds and not actor.use_dapo and actor.loss_function is None:
        yield (
            f"{POLICY_LOSS} is {actor.policy_loss}, but while {USE_DAPO} is false its ratio is clipped at 1 +- "
            f"clip_ratio {actor.clip_ratio:g}; set use_dapo to true, and its own bounds, such as "
            f"{bounds} (docs/loss.md)."
        )


def _loss_of_replayed_tokens(config: Config) -> Iterator[str]:
    """Yield a mistake for incompatible losses of replayed and new tokens."""
    actor = config.actor_rollout_ref.actor
    if not config.exp_manager.experience_replay.enable:
        return
    if POLICY_LOSSES[actor.policy_loss].over_sequences:
        yield (
            f"{POLICY_LOSS} is {actor.policy_loss}, which has one ratio per response, but {REPLAY}.enable is true, and "
            f"the loss of replayed tokens has one per token; set policy_loss to "
            f"{' or '.join(policy_losses_with(over_sequences=False))}, or enable to false."
        )
    elif actor.policy_loss != "dapo" and actor.off_policy_shaping_mode == "dapo_clip_higher":
        yield (
            f"{ACTOR}.off_policy_shaping_mode is dapo_clip_higher, which clips replayed tokens as new ones are clipped "
            f"with {POLICY_LOSS} dapo, but that is {actor.policy_loss}; set off_policy_shaping_mode to "
            f"exgrpo_policy_shaping, or policy_loss to dapo."
        )


def _soft_interval(config: Config) -> Iterator[str]:
    shaping = config.algorithm.overlong_reward_shaping
    if not shaping.enable:
        return
    limit = config.data.max_response_length
    if shaping.buffer_len >= limit:
        yield (
            f"{OVERLONG}.buffer_len is {shaping.buffer_len}, but must be below data.max_response_length {limit}; "
            f"a fifth of it is usual."
        )
    elif shaping.expected_len is not None and shaping.expected_len + shaping.buffer_len > limit:
        yield (
            f"{OVERLONG}.expected_len {shaping.expected_len} + buffer_len {shaping.buffer_len} is above "
            f"data.max_response_length {limit}, so that the soft interval would be cut; set expected_len to null."
        )


def _soft_penalty(config: Config) -> Iterator[str]:
    shaping = config.algorithm.overlong_reward_shaping
    if shaping.enable and shaping.buffer_len > 0 and shaping.penalty_factor == 0.0:
        yield f"{OVERLONG}.penalty_factor is 0, so that buffer_len {shaping.buffer_len} punishes nothing; set it to 1."


def _rewarded_truncation(config: Config) -> Iterator[str]:
    shaping = config.algorithm.overlong_reward_shaping
    if not shaping.enable or shaping.buffer_len > 0:
        return
    if shaping.truncation_penalty > 0.0 and shaping.soft_penalty_mode in ("additive", "multiplicative"):
        yield (
            f"{OVERLONG}.truncation_penalty is {shaping.truncation_penalty:g}, which rewards truncated responses in "
            f"mode {shaping.soft_penalty_mode}; make it negative."
        )


def _filtered_truncation(config: Config) -> Iterator[str]:
    shaping = config.algorithm.overlong_reward_shaping
    if not shaping.enable or shaping.buffer_len > 0:
        return
    penalty = shaping.truncation_penalty
    if penalty == 0.0 and not shaping.filter_truncated:
        yield (
            f"{OVERLONG}.enable is true, but buffer_len is 0, truncation_penalty is 0 and filter_truncated is false: "
            f"nothing would happen; set one of them, or enable to false."
        )
    if penalty != 0.0 and shaping.filter_truncated:
        yield (
            f"{OVERLONG}.filter_truncated is true, so that truncated responses have no loss, but truncation_penalty "
            f"{penalty:g} would still shift their groups' means; set it to 0, or filter_truncated to false."
        )


def _estimators(config: Config) -> Iterator[str]:
    chosen = config.algorithm.adv_estimator
    if advantage_estimator(config).needs_others and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{ESTIMATOR} is {chosen}, which compares a response with the others of its group, but {N} is 1; "
            f"set n to 2 or more, or {ESTIMATOR} to {' or '.join(estimators_with(per_token=True))}."
        )


def _punishment_below_zero(config: Config) -> Iterator[str]:
    shaping = config.algorithm.overlong_reward_shaping
    if shaping.enable and (shaping.buffer_len > 0 or shaping.truncation_penalty < 0.0):
        yield from _below_zero(config, f"{OVERLONG}.enable", "false")


def _kl_below_zero(config: Config) -> Iterator[str]:
    if uses_kl_in_reward(config):
        yield from _below_zero(config, f"{KL_CTRL}.kl_coef", "0")


def _kl_beside_own_estimator(config: Config) -> Iterator[str]:
    if uses_kl_in_reward(config) and advantage_estimator(config).is_own:
        yield (
            f"{KL_CTRL}.kl_coef is {config.algorithm.kl_ctrl.kl_coef:g}, a penalty in the reward, but {ESTIMATOR} is "
            f"{config.algorithm.adv_estimator}, which gets the rewards before the models have scored them; set kl_coef "
            f"to 0, and {ACTOR}.use_kl_loss to true for a KL in the loss."
        )


def _reward_model_below_zero(config: Config) -> Iterator[str]:
    if config.reward.model.path is not None:
        yield from _below_zero(config, "reward.model.path", "null")


def _below_zero(config: Config, key: str, off: str) -> Iterator[str]:
    """Yield the mistake of a key that may take rewards below 0, if the estimator divides by their
    mean."""
    if advantage_estimator(config).divides_by_mean:
        yield (
            f"{key} is {show_text(value_of(config, key))}, so that rewards may be negative, but {ESTIMATOR} is "
            f"{config.algorithm.adv_estimator}, which divides by their mean; set {key.split('.')[-1]} to {off}, or "
            f"adv_estimator to {' or '.join(estimators_with(per_token=False, divides_by_mean=False))}."
        )


def _off_policy_clip(config: Config) -> Iterator[str]:
    high = config.actor_rollout_ref.actor.off_policy_clip_ratio_high
    if not uses_experience_replay(config) or high is None:
        return
    low, _ = effective_clip(config)
    if high < low:
        yield (
            f"{ACTOR}.off_policy_clip_ratio_high is {high:g}, below the lower clip range {low:g}; clip-higher widens "
            f"the upper side: set it to that or more, or to null for the upper range of all tokens."
        )


def _replay_estimator(config: Config) -> Iterator[str]:
    estimator = config.algorithm.adv_estimator
    if uses_experience_replay(config) and advantage_estimator(config).per_token:
        yield (
            f"{REPLAY}.enable is true, but {ESTIMATOR} is {estimator}, which takes every token for one of the "
            f"current policy; set adv_estimator to {' or '.join(estimators_with(per_token=False))}, or enable to "
            f"false."
        )


def _replay_group_size(config: Config) -> Iterator[str]:
    if uses_experience_replay(config) and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{REPLAY}.enable is true, but {N} is 1, so that a replayed group would have no "
            f"new response; set n to 2 or more, or enable to false."
        )


def _replayed_share(config: Config) -> Iterator[str]:
    if not uses_experience_replay(config):
        return
    ratio = config.exp_manager.experience_replay.exp_ratio
    size = gen_batch_size(config)
    if ratio * size < 1.0:
        yield (
            f"{REPLAY}.exp_ratio {ratio:g} of the {size} prompts of a gen batch is less than one prompt, so "
            f"that nothing would be replayed; raise it, or set enable to false."
        )


def _replay_pool(config: Config) -> Iterator[str]:
    if not uses_experience_replay(config):
        return
    cap = config.exp_manager.experience_replay.max_pool_tokens
    longest = longest_sample(config)
    if cap < longest:
        yield (
            f"{REPLAY}.max_pool_tokens is {cap}, too small for one sample of {longest} tokens "
            f"({longest_in_words(config)}); raise it."
        )


def _kl_loss(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss and actor.kl_loss_coef == 0.0:
        yield (
            f"{ACTOR}.use_kl_loss is true, but {ACTOR}.kl_loss_coef is 0; set the coefficient, or the switch to false."
        )


def _kl_in_reward(config: Config) -> Iterator[str]:
    if config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.kl_coef == 0.0:
        yield (
            f"algorithm.use_kl_in_reward is true, but {KL_CTRL}.kl_coef is 0; set the coefficient, or the switch to "
            f"false."
        )


def _kl_controller(config: Config) -> Iterator[str]:
    control = config.algorithm.kl_ctrl
    if control.type == "adaptive" and control.kl_coef == 0.0 and not config.algorithm.use_kl_in_reward:
        yield (
            f"{KL_CTRL}.type is adaptive, but steers nothing while {KL_CTRL}.kl_coef is 0; set kl_coef, or type to "
            f"fixed."
        )


def _reference(config: Config) -> Iterator[str]:
    ref = config.actor_rollout_ref.ref
    if ref.path is not None and not needs_reference(config):
        yield (
            f"actor_rollout_ref.ref.path is {ref.path}, but no KL coefficient uses a reference model; set "
            f"{ACTOR}.use_kl_loss with kl_loss_coef, or {KL_CTRL}.kl_coef, or null here."
        )


# keys of our own terms or weights in the loss -> the function's argument for the same purpose
_TERMS_OF_OURS = {
    f"{ACTOR}.use_kl_loss": "ref_log_probs, where actor_rollout_ref.ref.path is given",
    f"{ACTOR}.entropy_coef": f"entropy, where {ACTOR}.calculate_entropy is true",
    f"{CORRECTION}.rollout_is": "rollout_log_probs",
    f"{CORRECTION}.rollout_rs": "rollout_log_probs",
    f"{CORRECTION}.rollout_token_veto_threshold": "rollout_log_probs",
    f"{CORRECTION}.bypass_mode": "rollout_log_probs",
    f"{REPLAY}.enable": "",
}


def _replay_of_servers_experts(config: Config) -> Iterator[str]:
    mode = config.actor_rollout_ref.actor.router_replay
    if mode == "rollout" and config.trainer.synthetic_batch:
        yield (
            f"{ROUTER_REPLAY} is rollout, but with trainer.synthetic_batch there are no servers whose experts could be "
            f"replayed; set it to old or off."
        )


def _replay_of_old_experts(config: Config) -> Iterator[str]:
    mode = config.actor_rollout_ref.actor.router_replay
    if mode == "old" and not needs_old_log_probs(config):
        yield (
            f"{ROUTER_REPLAY} is old, but there is no pass for old log-probs whose experts could be replayed: "
            f"{_why_none(config)}; set it to rollout or off."
        )


def _why_none(config: Config) -> str:
    if config.algorithm.rollout_correction.bypass_mode:
        return f"with {CORRECTION}.bypass_mode the servers' log-probs are the old ones"
    return "with one optimizer step per rollout step they are the current ones"


def terms_beside_loss_function(config: Config) -> Iterator[str]:
    """Yield the mistakes of keys with no place beside a loss function of the user's own."""
    if config.actor_rollout_ref.actor.loss_function is not None:
        for name in _TERMS_OF_OURS:
            yield from known_mistakes([_term_of_ours], config, name)


def _term_of_ours(config: Config, name: str) -> Iterator[str]:
    value = value_of(config, name)
    argument = _TERMS_OF_OURS[name]
    if value == known_keys()[name].default:
        return
    cure = f"; let the function compute that term, it gets {argument}" if argument else ""
    yield (
        f"{name} is {show_text(value)}, which cannot be combined with {LOSS_FUNCTION}, the whole loss{cure}; remove "
        f"one of the two."
    )


ALGORITHM_CHECKS = (
    _gen_batches,
    _masking,
    _group_size,
    staleness,
    _slots,
    _lower_clip,
    _upper_clip,
    _dual_clip,
    _bounds_of_papers,
    _loss_of_replayed_tokens,
    _soft_interval,
    _soft_penalty,
    _rewarded_truncation,
    _filtered_truncation,
    _estimators,
    _punishment_below_zero,
    _kl_below_zero,
    _kl_beside_own_estimator,
    _reward_model_below_zero,
    _off_policy_clip,
    _replay_estimator,
    _replay_group_size,
    _replayed_share,
    _replay_pool,
    _kl_loss,
    _kl_in_reward,
    _kl_controller,
    _reference,
    _replay_of_servers_experts,
    _replay_of_old_experts,
    terms_beside_loss_function,
)
