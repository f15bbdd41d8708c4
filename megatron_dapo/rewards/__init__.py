"""Rewards: verifiers by name, custom functions by import path, the pool of killable processes that runs them,
and overlong reward shaping."""

from megatron_dapo.rewards.pool import RewardPool
from megatron_dapo.rewards.registry import BUILTINS, BY_DATA_SOURCE, DATA_SOURCES, check_reward
from megatron_dapo.rewards.shaping import TRUNCATION_MODES, OverlongShaping, overlong_penalty, shape
from megatron_dapo.rewards.types import RewardRequest, RewardResult

__all__ = [
    "BUILTINS",
    "BY_DATA_SOURCE",
    "DATA_SOURCES",
    "TRUNCATION_MODES",
    "OverlongShaping",
    "RewardPool",
    "RewardRequest",
    "RewardResult",
    "check_reward",
    "overlong_penalty",
    "shape",
]
