"""Environments of multi-turn rollouts: the protocol, those that are shipped, and the processes that they run in."""

from megatron_dapo.envs.pool import EnvironmentFailure, EnvironmentPool, EnvironmentSession
from megatron_dapo.envs.registry import ENVIRONMENTS, check_environment
from megatron_dapo.envs.types import Environment, Observation, Task

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "EnvironmentFailure",
    "EnvironmentPool",
    "EnvironmentSession",
    "Observation",
    "Task",
    "check_environment",
]
