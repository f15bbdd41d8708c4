"""What multi-turn rollouts demand of the other keys."""

import re
from collections.abc import Iterator, Sequence

from megatron_dapo.config.keys import was_left_off
from megatron_dapo.config.loader import nearest
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema import Config
from megatron_dapo.config.schema.multi_turn import MultiTurnConfig

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
BUILT_IN_ENVIRONMENTS = ("reasoning_gym",)
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def variable_names(key: str, names: Sequence[str]) -> Iterator[Mistake]:
    """What is no name may be a value, which is not shown."""
    for number, name in enumerate(names):
        if not _VARIABLE.fullmatch(name):
            yield Mistake(
                (key,),
                f"{key}[{number}] is no name of an environment variable; give its name alone, the value stays in the "
                f"environment.",
            )


def multi_turn(config: Config) -> Iterator[Mistake]:
    keys, limit = config.actor_rollout_ref.rollout.multi_turn, config.data.max_response_length
    if not keys.enable:
        if was_left_off(keys):
            yield from _without_effect(keys)
        if config.reward.function == "environment":
            yield Mistake(
                ("reward.function", f"{MULTI_TURN}.enable"),
                f"reward.function is environment, which leaves the reward to one, but {MULTI_TURN}.enable is false; "
                f"set it to true, or name another reward.function.",
            )
        return
    yield from variable_names(f"{MULTI_TURN}.pass_env", keys.pass_env)
    name = keys.environment
    if name not in BUILT_IN_ENVIRONMENTS and not _IMPORT_PATH.fullmatch(name):
        near = nearest(name, BUILT_IN_ENVIRONMENTS)
        yield Mistake(
            (f"{MULTI_TURN}.environment", f"{MULTI_TURN}.enable"),
            f"{MULTI_TURN}.environment is {name!r}, which is neither {', '.join(BUILT_IN_ENVIRONMENTS)} nor of the "
            f"form package.module:Class{f'; the nearest is {near}' if near else ''}.",
        )
    if keys.max_tokens_per_turn is not None and keys.max_tokens_per_turn >= limit:
        yield Mistake(
            (f"{MULTI_TURN}.max_tokens_per_turn", "data.max_response_length"),
            f"{MULTI_TURN}.max_tokens_per_turn is {keys.max_tokens_per_turn}, but must be below "
            f"data.max_response_length {limit}, which is of the whole trajectory; lower it, or set it to null.",
        )
    if keys.step_timeout_s > keys.timeout_s:
        yield Mistake(
            (f"{MULTI_TURN}.step_timeout_s", f"{MULTI_TURN}.timeout_s"),
            f"{MULTI_TURN}.step_timeout_s is {keys.step_timeout_s:g}, longer than the whole trajectory's timeout_s "
            f"{keys.timeout_s:g}; lower the first or raise the second.",
        )
    if keys.timeout_s > config.actor_rollout_ref.rollout.step_timeout_s:
        yield Mistake(
            (f"{MULTI_TURN}.timeout_s", "actor_rollout_ref.rollout.step_timeout_s"),
            f"{MULTI_TURN}.timeout_s is {keys.timeout_s:g}, longer than the whole step's "
            f"actor_rollout_ref.rollout.step_timeout_s {config.actor_rollout_ref.rollout.step_timeout_s:g}; "
            f"lower the first or raise the second.",
        )


def _without_effect(keys: MultiTurnConfig) -> Iterator[Mistake]:
    for name, field in MultiTurnConfig.model_fields.items():
        value = getattr(keys, name)
        if name != "enable" and value != field.default:
            yield Mistake(
                (f"{MULTI_TURN}.{name}", f"{MULTI_TURN}.enable"),
                f"{MULTI_TURN}.{name} is {value!r}, but has no effect while {MULTI_TURN}.enable is false; "
                f"set enable to true, or remove {name}.",
            )
