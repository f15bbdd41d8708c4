"""Gymnasium's environments behind functions that take their state and hand it back.

The state is a Gymnasium environment, which changes in place: a handle, not a value to go back to. The parameters are
its specification (`gymnasium.envs.registration.EnvSpec`), so a shorter time limit is
`dataclasses.replace(env_params, max_episode_steps=200)`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import gymnasium
import torch
from gymnasium.envs.registration import EnvSpec
from torch import Tensor


class Step(NamedTuple):
    """obs: what the next action answers to. final_obs: what this one led to; the same, but where `AutoReset` has begun
    another episode. terminated: the task ended; truncated: its time limit came first."""

    obs: Tensor
    env_state: gymnasium.Env
    reward: float
    terminated: bool
    truncated: bool
    final_obs: Tensor


class Environment:
    """A task of Gymnasium with discrete actions, by name."""

    def __init__(self, name: str) -> None:
        self._spec = gymnasium.spec(name)

    def default_params(self) -> EnvSpec:
        return self._spec

    def reset(self, seed: int, env_params: EnvSpec) -> tuple[Tensor, gymnasium.Env]:
        """Return a new environment at the start of an episode. Its later episodes follow from the seed too."""
        env_state = env_params.make(disable_env_checker=True)
        obs, _ = env_state.reset(seed=seed)
        return _tensor(obs), env_state

    def step(self, env_state: gymnasium.Env, action: int, env_params: EnvSpec) -> Step:
        obs, reward, terminated, truncated, _ = env_state.step(action)
        obs = _tensor(obs)
        return Step(obs, env_state, float(reward), bool(terminated), bool(truncated), obs)


class AutoReset(Environment):
    """An environment whose step begins the next episode when one has ended."""

    def __init__(self, env: Environment) -> None:
        self._env = env

    def default_params(self) -> EnvSpec:
        return self._env.default_params()

    def step(self, env_state: gymnasium.Env, action: int, env_params: EnvSpec) -> Step:
        step = self._env.step(env_state, action, env_params)
        if not (step.terminated or step.truncated):
            return step
        obs, _ = env_state.reset()
        return step._replace(obs=_tensor(obs))


def make(name: str) -> tuple[Environment, EnvSpec]:
    """Return the environment and its parameters."""
    env = Environment(name)
    return env, env.default_params()


def reset_batch(env: Environment, seeds: Sequence[int], env_params: EnvSpec) -> tuple[Tensor, list[gymnasium.Env]]:
    """Start one environment per seed and return observations [N, ...] and states."""
    obs, env_states = zip(*(env.reset(seed, env_params) for seed in seeds), strict=True)
    return torch.stack(obs), list(env_states)


def _tensor(obs) -> Tensor:
    return torch.as_tensor(obs, dtype=torch.float32)
