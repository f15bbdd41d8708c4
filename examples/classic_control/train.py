"""Train PPO on CartPole-v1, which counts as solved when 100 episodes return 475 or more on average (500 is the most).

python -m examples.classic_control.train [--seed 0] [--env-steps 100000]         a quarter of a minute on one core
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from examples.classic_control.agent import PPO
from examples.classic_control.env import AutoReset, make, reset_batch
from examples.classic_control.types import PPOConfig, PPOMetrics, PPOState

ENVIRONMENT = "CartPole-v1"
SOLVED = 475.0
# docs/classic_control.md says why three of the defaults are changed
CARTPOLE = PPOConfig(num_envs=8, n_steps=64, lr=2.5e-3)
ENV_STEPS = 100_000


class Progress(NamedTuple):
    """The state after an update."""

    env_steps: int  # so far, of all environments
    recent: list[float]  # returns of the last 100 episodes
    metrics: PPOMetrics
    state: PPOState


def training(name: str, config: PPOConfig, num_env_steps: int, seed: int) -> Iterator[Progress]:
    """Train for the whole rollouts within num_env_steps, and yield one Progress per update."""
    env, env_params = make(name)
    env = AutoReset(env)
    obs, env_states = reset_batch(env, range(seed * config.num_envs, (seed + 1) * config.num_envs), env_params)
    state = PPO.init(torch.Generator().manual_seed(seed), obs.shape[1:], int(env_states[0].action_space.n), config)
    running, recent, per_rollout = torch.zeros(config.num_envs), [], config.n_steps * config.num_envs
    for env_steps in range(per_rollout, num_env_steps + 1, per_rollout):
        state, trajectories, obs, env_states, last_values = PPO.collect_rollout_batch(
            state, obs, env_states, env.step, env_params, config=config
        )
        state, metrics = PPO.update(state, trajectories, last_values, config=config)
        for reward, done in zip(trajectories.reward, trajectories.done, strict=True):
            running = running + reward
            recent = [*recent, *running[done].tolist()][-100:]
            running = torch.where(done, 0.0, running)
        yield Progress(env_steps, recent, metrics, state)


def play(act: Callable[[Tensor], Sequence[int]], name: str, num_episodes: int = 100, seed: int = 10_000) -> list[float]:
    """Play episodes side by side and return their returns.

    act: observations [num_episodes, ...] -> one action each.
    """
    env, env_params = make(name)
    obs, env_states = reset_batch(env, range(seed, seed + num_episodes), env_params)
    returns, is_running = [0.0] * num_episodes, [True] * num_episodes
    while any(is_running):
        for i, action in enumerate(act(obs)):
            if is_running[i]:
                step = env.step(env_states[i], action, env_params)
                obs[i], returns[i] = step.obs, returns[i] + step.reward
                is_running[i] = not (step.terminated or step.truncated)
    return returns


def evaluate(state: PPOState, name: str, config: PPOConfig, num_episodes: int = 100) -> list[float]:
    """Call `play` with actions sampled from the policy, as in training."""

    def act(obs: Tensor) -> list[int]:
        nonlocal state
        actions, _, _, state = PPO.act_batch(state, obs, config=config)
        return actions.tolist()

    return play(act, name, num_episodes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--env-steps", type=int, default=ENV_STEPS, help="of all environments together")
    options = parser.parse_args(arguments)
    per_rollout = CARTPOLE.num_envs * CARTPOLE.n_steps
    if options.env_steps < per_rollout:
        parser.error(f"--env-steps {options.env_steps} is less than one rollout; give at least {per_rollout}.")
    torch.set_num_threads(1)  # the networks are small: more threads wait for each other
    started = time.perf_counter()
    print(f"{ENVIRONMENT}, seed {options.seed}\n  env steps   return   entropy       KL   critic loss   seconds")
    for progress in training(ENVIRONMENT, CARTPOLE, options.env_steps, options.seed):
        if progress.state.step % 20 == 0 or progress.env_steps + per_rollout > options.env_steps:
            mean, m = sum(progress.recent) / max(len(progress.recent), 1), progress.metrics
            row = f"{progress.env_steps:>11}{mean:>9.1f}{m.entropy:>10.3f}{m.approx_kl:>9.4f}{m.critic_loss:>14.5f}"
            print(f"{row}{time.perf_counter() - started:>10.1f}", flush=True)
    returns = evaluate(progress.state, ENVIRONMENT, CARTPOLE)
    mean = sum(returns) / len(returns)
    verdict = "solved" if mean >= SOLVED else "not solved"
    print(f"100 fresh episodes: mean return {mean:.1f}, least {min(returns):.0f}: {verdict} (475 is asked for)")


if __name__ == "__main__":
    main()
