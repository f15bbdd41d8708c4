"""Keys that were given, but that another key keeps from being read."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from megatron_dapo.config.keys import changed, was_left_off
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema import Config
from megatron_dapo.config.schema.base import Section

ACTOR = "actor_rollout_ref.actor"
SAMPLING = "algorithm.dapo.dynamic_sampling"
GROUPS = "algorithm.filter_groups"
OVERLONG = "algorithm.dapo.overlong_reward_shaping"
KL_CTRL = "algorithm.kl_ctrl"
CORRECTION = "algorithm.rollout_correction"


class _Unread(NamedTuple):
    """Keys that are not read where `when` holds, which asks the keys `read`; why, and what would have them read."""

    keys: tuple[str, ...]
    read: tuple[str, ...]
    when: Callable[[Config], bool]
    why: str
    cure: str


def _switch(name: str, keys: str, section: Callable[[Config], Section]) -> _Unread:
    """Keys of a section that has a switch of its own, and where it is in the config."""
    names = tuple(f"{name}.{key}" for key in keys.split())
    switch = f"{name}.enable"
    return _Unread(
        names, (switch,), lambda config: was_left_off(section(config)), f"{switch} is false", "set enable to true"
    )


def _has_own_clip_sides(config: Config) -> bool:
    actor = config.actor_rollout_ref.actor
    return actor.use_dapo and None not in (actor.clip_ratio_low, actor.clip_ratio_high)


def _is_soft(config: Config) -> bool:
    """Whether over-long responses are punished by their length, and not for being truncated."""
    return config.algorithm.dapo.overlong_reward_shaping.buffer_len > 0


def _shapes(config: Config) -> bool:
    return config.algorithm.dapo.overlong_reward_shaping.enable


_UNREAD = (
    _Unread(
        (f"{ACTOR}.clip_ratio",),
        tuple(f"{ACTOR}.{key}" for key in ("use_dapo", "clip_ratio_low", "clip_ratio_high")),
        _has_own_clip_sides,
        "use_dapo is true and clip_ratio_low and clip_ratio_high are given",
        "set those two, or set them to null",
    ),
    _Unread(
        (f"{ACTOR}.kl_loss_type",),
        (f"{ACTOR}.use_kl_loss",),
        lambda config: not config.actor_rollout_ref.actor.use_kl_loss,
        f"{ACTOR}.use_kl_loss is false",
        "set use_kl_loss to true",
    ),
    _Unread(
        ("algorithm.kl_penalty",),
        (f"{KL_CTRL}.kl_coef", "algorithm.use_kl_in_reward"),
        lambda config: not config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.kl_coef == 0.0,
        f"{KL_CTRL}.kl_coef is 0",
        "set kl_coef",
    ),
    _Unread(
        (f"{KL_CTRL}.target_kl", f"{KL_CTRL}.horizon"),
        (f"{KL_CTRL}.type",),
        lambda config: config.algorithm.kl_ctrl.type == "fixed",
        f"{KL_CTRL}.type is fixed",
        "set type to adaptive",
    ),
    _Unread(
        (f"{CORRECTION}.rollout_is_threshold",),
        (f"{CORRECTION}.rollout_is",),
        lambda config: config.algorithm.rollout_correction.rollout_is == "none",
        f"{CORRECTION}.rollout_is is none",
        "set rollout_is to token",
    ),
    _switch(SAMPLING, "filter_mode", lambda config: config.algorithm.dapo.dynamic_sampling),
    _switch(GROUPS, "metric max_num_gen_batches on_exhausted", lambda config: config.algorithm.filter_groups),
    _switch(
        OVERLONG,
        "buffer_len expected_len penalty_factor truncation_penalty soft_penalty_mode filter_truncated",
        lambda config: config.algorithm.dapo.overlong_reward_shaping,
    ),
    _Unread(
        (f"{OVERLONG}.expected_len", f"{OVERLONG}.penalty_factor"),
        (f"{OVERLONG}.enable", f"{OVERLONG}.buffer_len"),
        lambda config: _shapes(config) and not _is_soft(config),
        f"{OVERLONG}.buffer_len is 0",
        "set buffer_len",
    ),
    _Unread(
        (f"{OVERLONG}.truncation_penalty", f"{OVERLONG}.soft_penalty_mode"),
        (f"{OVERLONG}.enable", f"{OVERLONG}.buffer_len"),
        lambda config: _shapes(config) and _is_soft(config),
        f"{OVERLONG}.buffer_len is above 0",
        "set buffer_len to 0",
    ),
)


def without_effect(config: Config) -> Iterator[Mistake]:
    for row in _UNREAD:
        if not row.when(config):
            continue
        for name, value in changed(config, row.keys):
            yield Mistake(
                (name, *row.read),
                f"{name} is {value}, but has no effect while {row.why}; {row.cure}, or remove "
                f"{name.rpartition('.')[2]}.",
            )
