"""What the keys of the algorithm demand of each other: clipping, DAPO's techniques, KL, estimators, replay.

A technique whose settings are given while its switch is off is a mistake (here, or in `unused_keys`): silently-off
techniques are how published recipes fail.
"""

from collections.abc import Iterator

from megatron_dapo.config.built_ins import IMPORT_PATH, estimators_with
from megatron_dapo.config.derived import (
    advantage_estimator,
    clip_keys,
    effective_clip,
    gen_batch_size,
    needs_old_log_probs,
    needs_reference,
    uses_dynamic_sampling,
    uses_filter_mode,
)
from megatron_dapo.config.key_names import (
    ACTOR,
    CORRECTION,
    ESTIMATOR,
    FILTER_MODE,
    GROUPS,
    KL_CTRL,
    LOSS_FUNCTION,
    OVERLONG,
    POLICY_LOSS,
    READ_FOR_OLD_LOG_PROBS,
    REPLAY,
    ROLLOUT,
    ROUTER_REPLAY,
    SAMPLING,
    SAMPLING_SWITCHES,
    USE_DAPO,
    N,
    keys_of,
)
from megatron_dapo.config.keys import known_keys, show_text, value_of, was_left_off
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema.config import Config


def gen_batches(config: Config) -> Iterator[Mistake]:
    size = config.data.train_batch_size
    prompts = gen_batch_size(config)
    dapo = config.algorithm.dapo
    if not uses_dynamic_sampling(config):
        if prompts != size:
            yield Mistake(
                ("data.gen_batch_size", "data.train_batch_size", *SAMPLING_SWITCHES),
                f"data.gen_batch_size is {prompts}, but has no effect while nothing is filtered: with dynamic sampling "
                f"off a step is one gen batch of data.train_batch_size {size}; set it to null, or enable {SAMPLING} "
                f"with a filter_mode other than none.",
            )
        return
    section = SAMPLING
    switches: tuple[str, ...] = SAMPLING_SWITCHES
    limit = dapo.dynamic_sampling.max_num_gen_batches
    if config.algorithm.filter_groups.enable:
        section = GROUPS
        switches = (f"{GROUPS}.enable",)
        limit = config.algorithm.filter_groups.max_num_gen_batches
    if 0 < limit and prompts * limit < size:
        yield Mistake(
            ("data.gen_batch_size", "data.train_batch_size", f"{section}.max_num_gen_batches", *switches),
            f"data.gen_batch_size {prompts} x {section}.max_num_gen_batches {limit} prompts can never fill "
            f"data.train_batch_size {size}; raise one of the first two.",
        )


def masking(config: Config) -> Iterator[Mistake]:
    """Yield a mistake where form mask has nothing to mask, or where a gen batch is not as large as the training batch:
    with form mask, a step is one gen batch. The key that limits the number of gen batches may keep its value for the
    other form."""
    if config.algorithm.dapo.dynamic_sampling.form != "mask":
        return
    if not uses_filter_mode(config):
        yield Mistake(
            (f"{SAMPLING}.form", *FILTER_MODE),
            f"{SAMPLING}.form is mask, but nothing is filtered that it could mask; enable algorithm.dapo and "
            f"{SAMPLING} with a filter_mode other than none, or remove form.",
        )
        return
    size = config.data.train_batch_size
    prompts = gen_batch_size(config)
    if prompts != size:
        yield Mistake(
            (f"{SAMPLING}.form", "data.gen_batch_size", "data.train_batch_size", *FILTER_MODE),
            f"data.gen_batch_size is {prompts}, but with {SAMPLING}.form mask a step is one gen batch of "
            f"data.train_batch_size {size}; set gen_batch_size to null, or form to resample.",
        )


def filter_groups(config: Config) -> Iterator[Mistake]:
    groups = config.algorithm.filter_groups
    if not groups.enable:
        return
    if config.algorithm.dapo.dynamic_sampling.enable:
        yield Mistake(
            (f"{GROUPS}.enable", f"{SAMPLING}.enable"),
            f"{GROUPS}.enable and {SAMPLING}.enable are both true, but a group is filtered once; keep the first for "
            f"the spread of a metric, or the second for right and wrong answers.",
        )


def group_size(config: Config) -> Iterator[Mistake]:
    if config.actor_rollout_ref.rollout.n > 1 or not uses_dynamic_sampling(config):
        return
    if config.algorithm.filter_groups.enable:
        yield Mistake(
            (N, f"{GROUPS}.enable"),
            f"{N} is 1, but {GROUPS}.enable is true, which compares the responses of a group; "
            f"set n to 2 or more, or enable to false.",
        )
    else:
        yield Mistake(
            (N, *SAMPLING_SWITCHES),
            f"{N} is 1, but with {SAMPLING}.enable true every group of one is uniform and would be dropped; "
            f"set n to 2 or more, or switch dynamic sampling off.",
        )


def staleness(config: Config) -> Iterator[Mistake]:
    """Refuse samples of earlier weights without a correction: the loss would take wrong log-probs for old. A veto alone
    is none: it leaves nearly all of them as they are."""
    max_staleness = config.actor_rollout_ref.rollout.max_staleness
    correction = config.algorithm.rollout_correction
    corrects_itself = config.actor_rollout_ref.actor.loss_function is not None  # it is given rollout_log_probs
    is_corrected = correction.rollout_is != "none" or correction.bypass_mode or correction.rollout_rs != "none"
    if max_staleness and not corrects_itself and not is_corrected:
        yield Mistake(
            (
                f"{ROLLOUT}.max_staleness",
                LOSS_FUNCTION,
                *keys_of(CORRECTION, "rollout_is", "rollout_rs", "bypass_mode"),
            ),
            f"{ROLLOUT}.max_staleness is {max_staleness}, but {CORRECTION}.rollout_is is none, so that groups of "
            f"earlier weights would be trained on as if the current ones had written them; set rollout_is to token, or "
            f"rollout_rs, or bypass_mode, or max_staleness to 0.",
        )


def slots(config: Config) -> Iterator[Mistake]:
    """Refuse requests that would wait inside a server while weights are pushed: those that run are put behind them."""
    rollout = config.actor_rollout_ref.rollout
    limit = rollout.server.max_running_requests
    if rollout.max_staleness and limit is not None and rollout.max_concurrency > limit:
        yield Mistake(
            (f"{ROLLOUT}.max_concurrency", f"{ROLLOUT}.server.max_running_requests", f"{ROLLOUT}.max_staleness"),
            f"{ROLLOUT}.max_concurrency is {rollout.max_concurrency}, but a server decodes "
            f"{ROLLOUT}.server.max_running_requests {limit} at once, and with max_staleness {rollout.max_staleness} "
            f"none may wait inside it; set max_concurrency to {limit} or less.",
        )


def clipping(config: Config) -> Iterator[Mistake]:
    actor = config.actor_rollout_ref.actor
    low, high = effective_clip(config)
    low_key, high_key = clip_keys(config)
    is_weight = actor.policy_loss == "cispo"  # clipped whatever the advantage; its paper has no lower bound
    if low > 1.0 and is_weight:
        yield Mistake(
            (low_key, USE_DAPO, POLICY_LOSS),
            f"{low_key} is {low:g}, but must be at most 1, which is no lower bound: the ratio of two probabilities is "
            f"never negative.",
        )
    if low >= 1.0 and not is_weight:
        yield Mistake(
            (low_key, USE_DAPO, POLICY_LOSS),
            f"{low_key} is {low:g}, but must be below 1: the ratio of two probabilities is never negative.",
        )
    if high < low and not is_weight:
        yield Mistake(
            (high_key, low_key, USE_DAPO, POLICY_LOSS),
            f"{ACTOR}.clip_ratio_high is {high:g}, below {low_key.rpartition('.')[2]} {low:g}; clip-higher widens the "
            f"upper side: set clip_ratio_high to that or more.",
        )
    if actor.clip_ratio_c is not None and actor.clip_ratio_c <= 1.0 + high and not is_weight:
        yield Mistake(
            (f"{ACTOR}.clip_ratio_c", high_key, USE_DAPO, POLICY_LOSS),
            f"{ACTOR}.clip_ratio_c is {actor.clip_ratio_c:g}, inside the clip range that ends at {1.0 + high:g}; "
            f"set it above that, or to null for no dual clip.",
        )


_BOUNDS_OF_PAPERS = {
    "cispo": "clip_ratio_low=1 clip_ratio_high=0.28",
    "gspo": "clip_ratio_low=3e-4 clip_ratio_high=4e-4",
}


def policy_loss(config: Config) -> Iterator[Mistake]:
    """Yield a mistake where a loss other than DAPO's would have DAPO's symmetric range, or where replayed tokens would
    have a loss that does not go with that of new ones."""
    actor = config.actor_rollout_ref.actor
    if actor.policy_loss in _BOUNDS_OF_PAPERS and not actor.use_dapo and actor.loss_function is None:
        yield Mistake(
            (POLICY_LOSS, USE_DAPO, LOSS_FUNCTION),
            f"{POLICY_LOSS} is {actor.policy_loss}, but while {USE_DAPO} is false its ratio is clipped at 1 +- "
            f"clip_ratio {actor.clip_ratio:g}; set use_dapo to true, and its own bounds, such as "
            f"{_BOUNDS_OF_PAPERS[actor.policy_loss]} (docs/loss.md).",
        )
    if not config.exp_manager.experience_replay.enable:
        return
    if actor.policy_loss == "gspo":
        yield Mistake(
            (POLICY_LOSS, f"{REPLAY}.enable"),
            f"{POLICY_LOSS} is gspo, which has one ratio per response, but {REPLAY}.enable is true, and the loss of "
            f"replayed tokens has one per token; set policy_loss to dapo or cispo, or enable to false.",
        )
    if actor.policy_loss == "cispo" and actor.off_policy_shaping_mode == "dapo_clip_higher":
        yield Mistake(
            (POLICY_LOSS, f"{ACTOR}.off_policy_shaping_mode", f"{REPLAY}.enable"),
            f"{ACTOR}.off_policy_shaping_mode is dapo_clip_higher, which clips replayed tokens as new ones are clipped "
            f"with {POLICY_LOSS} dapo, but that is cispo; set off_policy_shaping_mode to exgrpo_policy_shaping, or "
            f"policy_loss to dapo.",
        )


def dapo_switches(config: Config) -> Iterator[Mistake]:
    dapo = config.algorithm.dapo
    switches = {SAMPLING: dapo.dynamic_sampling.enable, OVERLONG: dapo.overlong_reward_shaping.enable}
    for key, is_on in switches.items():
        if is_on and was_left_off(dapo):
            yield Mistake(
                (f"{key}.enable", "algorithm.dapo.enable"),
                f"{key}.enable is true, but has no effect while algorithm.dapo.enable is false; "
                f"set algorithm.dapo.enable to true, or {key}.enable to false.",
            )
    if dapo.enable and not any(switches.values()):
        yield Mistake(
            ("algorithm.dapo.enable", *(f"{key}.enable" for key in switches)),
            f"algorithm.dapo.enable is true, but does nothing by itself; enable {SAMPLING} or {OVERLONG}, "
            f"or set it to false (clip-higher is {ACTOR}.use_dapo).",
        )


def overlong_shaping(config: Config) -> Iterator[Mistake]:
    shaping = config.algorithm.dapo.overlong_reward_shaping
    limit = config.data.max_response_length
    if not shaping.enable:
        return
    if shaping.buffer_len >= limit:
        yield Mistake(
            (f"{OVERLONG}.enable", f"{OVERLONG}.buffer_len", "data.max_response_length"),
            f"{OVERLONG}.buffer_len is {shaping.buffer_len}, but must be below data.max_response_length {limit}; "
            f"a fifth of it is usual.",
        )
    elif shaping.expected_len is not None and shaping.expected_len + shaping.buffer_len > limit:
        yield Mistake(
            (f"{OVERLONG}.enable", f"{OVERLONG}.expected_len", f"{OVERLONG}.buffer_len", "data.max_response_length"),
            f"{OVERLONG}.expected_len {shaping.expected_len} + buffer_len {shaping.buffer_len} is above "
            f"data.max_response_length {limit}, so that the soft interval would be cut; set expected_len to null.",
        )
    yield from _overlong_penalties(config)


def _overlong_penalties(config: Config) -> Iterator[Mistake]:
    shaping = config.algorithm.dapo.overlong_reward_shaping
    penalty = shaping.truncation_penalty
    soft = shaping.buffer_len > 0
    if soft and shaping.penalty_factor == 0.0:
        yield Mistake(
            keys_of(OVERLONG, "enable", "penalty_factor", "buffer_len"),
            f"{OVERLONG}.penalty_factor is 0, so that buffer_len {shaping.buffer_len} punishes nothing; set it to 1.",
        )
    if not soft and penalty == 0.0 and not shaping.filter_truncated:
        yield Mistake(
            keys_of(OVERLONG, "enable", "buffer_len", "truncation_penalty", "filter_truncated"),
            f"{OVERLONG}.enable is true, but buffer_len is 0, truncation_penalty is 0 and filter_truncated is false: "
            f"nothing would happen; set one of them, or enable to false.",
        )
    if not soft and penalty > 0.0 and shaping.soft_penalty_mode in ("additive", "multiplicative"):
        yield Mistake(
            keys_of(OVERLONG, "enable", "truncation_penalty", "soft_penalty_mode", "buffer_len"),
            f"{OVERLONG}.truncation_penalty is {penalty:g}, which rewards truncated responses in mode "
            f"{shaping.soft_penalty_mode}; make it negative.",
        )
    if not soft and penalty != 0.0 and shaping.filter_truncated:
        yield Mistake(
            keys_of(OVERLONG, "enable", "filter_truncated", "truncation_penalty", "buffer_len"),
            f"{OVERLONG}.filter_truncated is true, so that truncated responses have no loss, but truncation_penalty "
            f"{penalty:g} would still shift their groups' means; set it to 0, or filter_truncated to false.",
        )


def estimators(config: Config) -> Iterator[Mistake]:
    chosen = config.algorithm.adv_estimator
    if advantage_estimator(config).needs_others and config.actor_rollout_ref.rollout.n == 1:
        yield Mistake(
            (ESTIMATOR, N),
            f"{ESTIMATOR} is {chosen}, which compares a response with the others of its group, but {N} is 1; "
            f"set n to 2 or more, or {ESTIMATOR} to {' or '.join(estimators_with(per_token=True))}.",
        )


def experience_replay(config: Config) -> Iterator[Mistake]:
    keys = config.exp_manager.experience_replay
    actor = config.actor_rollout_ref.actor
    if not keys.enable:
        return
    low = effective_clip(config)[0]
    high = actor.off_policy_clip_ratio_high
    if high is not None and high < low:
        yield Mistake(
            (f"{ACTOR}.off_policy_clip_ratio_high", f"{ACTOR}.use_dapo", clip_keys(config)[0]),
            f"{ACTOR}.off_policy_clip_ratio_high is {high:g}, below the lower clip range {low:g}; clip-higher widens "
            f"the upper side: set it to that or more, or to null for the upper range of all tokens.",
        )
    yield from _replayed_groups(config)


def _replayed_groups(config: Config) -> Iterator[Mistake]:
    """Yield the mistakes of the groups that borrow a trajectory, and of the pool that lends it."""
    keys = config.exp_manager.experience_replay
    data = config.data
    n = config.actor_rollout_ref.rollout.n
    estimator = config.algorithm.adv_estimator
    size = gen_batch_size(config)
    if advantage_estimator(config).per_token:
        yield Mistake(
            (f"{REPLAY}.enable", ESTIMATOR),
            f"{REPLAY}.enable is true, but {ESTIMATOR} is {estimator}, which takes every token for one of the "
            f"current policy; set adv_estimator to {' or '.join(estimators_with(per_token=False))}, or enable to "
            f"false.",
        )
    if n == 1:
        yield Mistake(
            (f"{REPLAY}.enable", N),
            f"{REPLAY}.enable is true, but {N} is 1, so that a replayed group would have no "
            f"new response; set n to 2 or more, or enable to false.",
        )
    if keys.exp_ratio * size < 1.0:
        yield Mistake(
            (f"{REPLAY}.enable", f"{REPLAY}.exp_ratio", "data.train_batch_size", "data.gen_batch_size"),
            f"{REPLAY}.exp_ratio {keys.exp_ratio:g} of the {size} prompts of a gen batch is less than one prompt, so "
            f"that nothing would be replayed; raise it, or set enable to false.",
        )
    longest = data.max_prompt_length + data.max_response_length
    if keys.max_pool_tokens < longest:
        yield Mistake(
            (f"{REPLAY}.max_pool_tokens", "data.max_prompt_length", "data.max_response_length"),
            f"{REPLAY}.max_pool_tokens is {keys.max_pool_tokens}, too small for one sample of {longest} tokens "
            f"(data.max_prompt_length {data.max_prompt_length} + data.max_response_length {data.max_response_length}); "
            f"raise it.",
        )


def kl(config: Config) -> Iterator[Mistake]:
    actor = config.actor_rollout_ref.actor
    algorithm = config.algorithm
    control = algorithm.kl_ctrl
    pairs = (
        (f"{ACTOR}.use_kl_loss", actor.use_kl_loss, f"{ACTOR}.kl_loss_coef", actor.kl_loss_coef),
        ("algorithm.use_kl_in_reward", algorithm.use_kl_in_reward, f"{KL_CTRL}.kl_coef", control.kl_coef),
    )
    for switch_key, is_on, coefficient_key, coefficient in pairs:
        if is_on and coefficient == 0.0:
            yield Mistake(
                (switch_key, coefficient_key),
                f"{switch_key} is true, but {coefficient_key} is 0; set the coefficient, or the switch to false.",
            )
    if control.type == "adaptive" and control.kl_coef == 0.0 and not algorithm.use_kl_in_reward:
        yield Mistake(
            (f"{KL_CTRL}.type", f"{KL_CTRL}.kl_coef", "algorithm.use_kl_in_reward"),
            f"{KL_CTRL}.type is adaptive, but steers nothing while {KL_CTRL}.kl_coef is 0; set kl_coef, or type to "
            f"fixed.",
        )
    ref = config.actor_rollout_ref.ref
    kl_keys = [key for switch, _, coefficient, _ in pairs for key in (switch, coefficient)]
    if ref.path is not None and not needs_reference(config):
        yield Mistake(
            ("actor_rollout_ref.ref.path", LOSS_FUNCTION, *kl_keys),
            f"actor_rollout_ref.ref.path is {ref.path}, but no KL coefficient uses a reference model; set "
            f"{ACTOR}.use_kl_loss with kl_loss_coef, or {KL_CTRL}.kl_coef, or null here.",
        )


# keys that would put a term of ours into the loss, or weigh it: key -> what the function does in its place
_TERMS_OF_OURS = {
    f"{ACTOR}.use_kl_loss": "ref_log_probs, where actor_rollout_ref.ref.path is given",
    f"{ACTOR}.entropy_coef": f"entropy, where {ACTOR}.calculate_entropy is true",
    f"{CORRECTION}.rollout_is": "rollout_log_probs",
    f"{CORRECTION}.rollout_rs": "rollout_log_probs",
    f"{CORRECTION}.rollout_token_veto_threshold": "rollout_log_probs",
    f"{CORRECTION}.bypass_mode": "rollout_log_probs",
    f"{REPLAY}.enable": "",
}


def router_replay(config: Config) -> Iterator[Mistake]:
    mode = config.actor_rollout_ref.actor.router_replay
    if mode == "rollout" and config.trainer.synthetic_batch:
        yield Mistake(
            (ROUTER_REPLAY, "trainer.synthetic_batch"),
            f"{ROUTER_REPLAY} is rollout, but with trainer.synthetic_batch there are no servers whose experts could be "
            f"replayed; set it to old or off.",
        )
    if mode == "old" and not needs_old_log_probs(config):
        yield Mistake(
            (ROUTER_REPLAY, *READ_FOR_OLD_LOG_PROBS),
            f"{ROUTER_REPLAY} is old, but there is no pass for old log-probs whose experts could be replayed: "
            f"{_why_none(config)}; set it to rollout or off.",
        )


def _why_none(config: Config) -> str:
    if config.algorithm.rollout_correction.bypass_mode:
        return f"with {CORRECTION}.bypass_mode the servers' log-probs are the old ones"
    return "with one optimizer step per rollout step they are the current ones"


def loss_function(config: Config) -> Iterator[Mistake]:
    """Yield the mistakes of `actor.loss_function` with the keys that it cannot be combined with."""
    path = config.actor_rollout_ref.actor.loss_function
    if path is None:
        return
    if not IMPORT_PATH.fullmatch(path):
        yield Mistake(
            (LOSS_FUNCTION,),
            f"{LOSS_FUNCTION} is {path!r}, which is not of the form package.module:function; correct it.",
        )
    for name, argument in _TERMS_OF_OURS.items():
        value = value_of(config, name)
        if value == known_keys()[name].default:
            continue
        cure = f"; let the function compute that term, it gets {argument}" if argument else ""
        yield Mistake(
            (name, LOSS_FUNCTION),
            f"{name} is {show_text(value)}, which cannot be combined with {LOSS_FUNCTION}, the whole loss{cure}; "
            f"remove one of the two.",
        )


ALGORITHM_CHECKS = (
    gen_batches,
    masking,
    filter_groups,
    group_size,
    staleness,
    slots,
    clipping,
    policy_loss,
    dapo_switches,
    overlong_shaping,
    estimators,
    experience_replay,
    kl,
    router_replay,
    loss_function,
)
