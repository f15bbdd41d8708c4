"""Gymnasium's environments behind functions of their state.

The state is a Gymnasium environment, changed in place: a handle, not a value to go back to. The
parameters are its specification (`gymnasium.envs.registration.EnvSpec`), so a shorter time limit is
`dataclasses.replace(env_params, max_episode_steps=200)`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import gymnasium
import torch
from gymnasium.envs.registration import EnvSpec
from torch import Tensor


class Step(NamedTuple):
    """One step of an environment."""

    obs: Tensor  # for the next action
    env_state: gymnasium.Env
    reward: float
    terminated: bool  # the task ended
    truncated: bool  # its time limit came first
    final_obs: Tensor  # after this step; differs from obs after a reset by `AutoReset`


class Environment:
    """A task of Gymnasium with discrete actions, by name."""

    def __init__(self, name: str) -> None:
        self._spec = gymnasium.spec(name)

    def default_params(self) -> EnvSpec:
        return self._spec

    def reset(self, seed: int, env_params: EnvSpec) -> tuple[Tensor, gymnasium.Env]:
        """Return a new environment at the start of an episode. Its later episodes follow from the
        seed too."""
        env_state = env_params.make(disable_env_checker=True)
        obs, _ = env_state.reset(seed=seed)
        return _tensor(obs), env_state

    def step(self, env_state: gymnasium.Env, action: int, env_params: EnvSpec) -> Step:
        obs, reward, terminated, truncated, _ = env_state.step(action)
        obs = _tensor(obs)
        return Step(obs, env_state, float(reward), bool(terminated), bool(truncated), obs)


class AutoReset(Environment):
    """An environment with a reset in each last step of an episode."""

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
