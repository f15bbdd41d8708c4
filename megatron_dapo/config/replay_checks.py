"""What experience replay demands of the other keys."""

from collections.abc import Iterator

from megatron_dapo.config.derived import clip_keys, effective_clip, gen_batch_size
from megatron_dapo.config.keys import changed, was_left_off
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema import Config

REPLAY = "exp_manager.experience_replay"
ACTOR = "actor_rollout_ref.actor"
MODE = f"{ACTOR}.off_policy_shaping_mode"
_READ_BY_REPLAY = (
    f"{REPLAY}.replay_start_ratio",
    f"{REPLAY}.exp_ratio",
    f"{REPLAY}.max_trajectories_per_task",
    f"{REPLAY}.max_pool_tokens",
    MODE,
    f"{ACTOR}.off_policy_shaping_beta",
    f"{ACTOR}.off_policy_clip_ratio_high",
)
# key -> the mode that reads it
_READ_BY_MODE = {
    f"{ACTOR}.off_policy_shaping_beta": "exgrpo_policy_shaping",
    f"{ACTOR}.off_policy_clip_ratio_high": "dapo_clip_higher",
}


def experience_replay(config: Config) -> Iterator[Mistake]:
    keys, actor = config.exp_manager.experience_replay, config.actor_rollout_ref.actor
    if not keys.enable:
        for name, value in changed(config, _READ_BY_REPLAY if was_left_off(keys) else ()):
            yield Mistake(
                (name, f"{REPLAY}.enable"),
                f"{name} is {value}, but has no effect while {REPLAY}.enable is false; set enable to true, or "
                f"remove {name.rpartition('.')[2]}.",
            )
        return
    for name, value in changed(config, _READ_BY_MODE):
        if actor.off_policy_shaping_mode != _READ_BY_MODE[name]:
            yield Mistake(
                (name, MODE),
                f"{name} is {value}, but has no effect while {MODE} is {actor.off_policy_shaping_mode}; set it "
                f"to {_READ_BY_MODE[name]}, or remove {name.rpartition('.')[2]}.",
            )
    low, high = effective_clip(config)[0], actor.off_policy_clip_ratio_high
    if high is not None and high < low:
        yield Mistake(
            (f"{ACTOR}.off_policy_clip_ratio_high", f"{ACTOR}.use_dapo", clip_keys(config)[0]),
            f"{ACTOR}.off_policy_clip_ratio_high is {high:g}, below the lower clip range {low:g}; clip-higher widens "
            f"the upper side: set it to that or more, or to null for the upper range of all tokens.",
        )
    yield from _groups(config)


def _groups(config: Config) -> Iterator[Mistake]:
    """Of the groups that borrow a trajectory, and the pool that lends it."""
    keys, data, n = config.exp_manager.experience_replay, config.data, config.actor_rollout_ref.rollout.n
    estimator, size = config.algorithm.adv_estimator, gen_batch_size(config)
    if estimator in ("gae", "reinforce_plus_plus"):
        yield Mistake(
            (f"{REPLAY}.enable", "algorithm.adv_estimator"),
            f"{REPLAY}.enable is true, but algorithm.adv_estimator is {estimator}, which takes every token for one of "
            f"the current policy; set adv_estimator to grpo, rloo or remax, or enable to false.",
        )
    if n == 1:
        yield Mistake(
            (f"{REPLAY}.enable", "actor_rollout_ref.rollout.n"),
            f"{REPLAY}.enable is true, but actor_rollout_ref.rollout.n is 1, so that a replayed group would have no "
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
