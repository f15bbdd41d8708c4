"""PPO (arXiv 1707.06347) as functions of an explicit state.

Advantages, the clipped loss and the value loss are the language-model trainer's
(`megatron_dapo.algorithms`): here a "token" is a step of an environment.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from examples.classic_control.env import Step
from examples.classic_control.networks import ActorCriticParams, ActorCriticShared
from examples.classic_control.types import PPOConfig, PPOMetrics, PPOState, PPOTransition
from megatron_dapo.algorithms.gae import gae
from megatron_dapo.algorithms.policy_loss import Clip, policy_loss
from megatron_dapo.algorithms.value_loss import value_loss
from megatron_dapo.algorithms.whitening import moments, whiten

EnvStep = Callable[[Any, int, Any], Step]


class PPO:
    """A namespace of static methods. A method takes a `PPOState` and returns a new one."""

    @staticmethod
    def init(rng: torch.Generator, obs_shape: tuple[int], n_actions: int, config: PPOConfig) -> PPOState:
        """Return a new agent. All its random numbers follow from rng, which does not change."""
        rng = rng.clone_state()
        network = ActorCriticShared if config.shared_backbone else ActorCriticParams
        (obs_dim,) = obs_shape
        params = network(obs_dim, n_actions, config.hidden_sizes, rng)
        return PPOState(params, make_optimizer(params, config), 0, rng)

    @staticmethod
    def act(state: PPOState, obs: Tensor, *, config: PPOConfig) -> tuple[Tensor, Tensor, Tensor, PPOState]:
        """Return (action, log-prob, value, state) for one observation [obs_dim]."""
        actions, log_probs, values, state = PPO.act_batch(state, obs[None], config=config)
        return actions[0], log_probs[0], values[0], state

    @staticmethod
    @torch.no_grad()
    def act_batch(state: PPOState, obs: Tensor, *, config: PPOConfig) -> tuple[Tensor, Tensor, Tensor, PPOState]:
        """Return (actions, log-probs, values, state), each [N], for observations [N, obs_dim]."""
        logits, values = state.params(obs)
        log_probs, rng = logits.log_softmax(-1), state.rng.clone_state()
        actions = torch.multinomial(log_probs.exp(), 1, generator=rng)
        return actions[:, 0], log_probs.gather(1, actions)[:, 0], values, state._replace(rng=rng)

    @staticmethod
    def evaluate_actions(
        params: ActorCriticParams | ActorCriticShared, obs: Tensor, actions: Tensor, *, config: PPOConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log-probs, values, entropy), each [...], with gradient, for obs [..., obs_dim]
        and actions [...]."""
        logits, values = params(obs)
        policy = Categorical(logits=logits, validate_args=False)
        return policy.log_prob(actions), values, policy.entropy()

    @staticmethod
    def get_value(state: PPOState, obs: Tensor, *, config: PPOConfig) -> Tensor:
        """Return the value of one observation, a scalar."""
        return PPO.get_value_batch(state, obs, config=config)

    @staticmethod
    @torch.no_grad()
    def get_value_batch(state: PPOState, obs: Tensor, *, config: PPOConfig) -> Tensor:
        """Return values [N] of observations [N, obs_dim]."""
        return state.params(obs)[1]

    @staticmethod
    def collect_rollout(
        state: PPOState, obs: Tensor, env_state: Any, env_step_fn: EnvStep, env_params: Any, *, config: PPOConfig
    ) -> tuple[PPOState, PPOTransition, Tensor, Any, Tensor]:
        """Return (state, trajectory [T], next observation, env_state, its value) after n_steps of
        one environment."""
        state, trajectory, obs, (env_state,), last_value = PPO.collect_rollout_batch(
            state, obs[None], [env_state], env_step_fn, env_params, config=config
        )
        return state, PPOTransition(*(field[:, 0] for field in trajectory)), obs[0], env_state, last_value[0]

    @staticmethod
    def collect_rollout_batch(
        state: PPOState,
        obs: Tensor,
        env_states: Sequence[Any],
        env_step_fn: EnvStep,
        env_params: Any,
        *,
        config: PPOConfig,
    ) -> tuple[PPOState, PPOTransition, Tensor, list[Any], Tensor]:
        """Return (state, trajectories [T, N], next observations, env_states, their values [N])
        after n_steps of each environment. env_step_fn begins the next episode by itself
        (`AutoReset.step`)."""
        rows = []
        for _ in range(config.n_steps):
            actions, log_probs, values, state = PPO.act_batch(state, obs, config=config)
            pairs = zip(env_states, actions.tolist(), strict=True)
            steps = [env_step_fn(env_state, action, env_params) for env_state, action in pairs]
            rewards = torch.tensor([step.reward for step in steps])
            done = torch.tensor([step.terminated or step.truncated for step in steps])
            bootstrap = _bootstrap(state, steps, config)
            rows.append(PPOTransition(obs, actions, rewards, done, log_probs, values, bootstrap))
            obs, env_states = torch.stack([step.obs for step in steps]), [step.env_state for step in steps]
        trajectories = PPOTransition(*(torch.stack(field) for field in zip(*rows, strict=True)))
        return state, trajectories, obs, env_states, PPO.get_value_batch(state, obs, config=config)

    @staticmethod
    def update(
        state: PPOState, trajectories: PPOTransition, last_value: Tensor, *, config: PPOConfig
    ) -> tuple[PPOState, PPOMetrics]:
        """Train with n_epochs passes over a rollout, each in n_minibatches random parts.

        The rollout is [T] or [T, N]; last_value is a scalar or [N].
        """
        advantages, returns = rollout_advantages(trajectories, last_value, config)
        advantages = whiten(advantages, moments(advantages, torch.ones_like(advantages)))
        steps = trajectories.obs.flatten(0, returns.dim() - 1)
        columns = [
            field.flatten()
            for field in (trajectories.action, trajectories.log_prob, trajectories.value, advantages, returns)
        ]
        # together: the optimizer's are the copies
        params, optimizer = copy.deepcopy((state.params, state.opt_state))
        rng, all_metrics = state.rng.clone_state(), []
        for _ in range(config.n_epochs):
            for part in torch.randperm(len(steps), generator=rng).tensor_split(config.n_minibatches):
                loss, metrics = minibatch_loss(params, steps[part], *(column[part] for column in columns), config)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(params.parameters(), config.max_grad_norm)
                optimizer.step()
                all_metrics.append(metrics)
        means = torch.stack(all_metrics).mean(0).tolist()
        return PPOState(params, optimizer, state.step + 1, rng), PPOMetrics(*means)


def make_optimizer(params: torch.nn.Module, config: PPOConfig) -> torch.optim.Adam:
    """Return Adam with eps 1e-5; `PPO.update` clips the gradient's norm before each step."""
    return torch.optim.Adam(params.parameters(), lr=config.lr, eps=1e-5)


def rollout_advantages(trajectories: PPOTransition, last_value: Tensor, config: PPOConfig) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) in the shape of the rewards.

    A time limit is not part of the task, and no observation shows it: its episode would have gone
    on. So gamma V(final observation) joins its last reward (arXiv 1712.00378), and the trace stops
    there like at any end.
    """
    rewards = trajectories.reward + config.gamma * trajectories.bootstrap
    time_last = [x.movedim(0, -1) for x in (rewards, trajectories.value, trajectories.done)]
    advantages, returns = gae(
        time_last[0],
        time_last[1],
        done=time_last[2],
        last_value=last_value,
        gamma=config.gamma,
        lam=config.gae_lambda,
    )
    return advantages.movedim(-1, 0), returns.movedim(-1, 0)


def minibatch_loss(
    params: ActorCriticParams | ActorCriticShared,
    obs: Tensor,
    actions: Tensor,
    old_log_probs: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    config: PPOConfig,
) -> tuple[Tensor, Tensor]:
    """Return the total loss of n steps (all [n], obs [n, obs_dim]) with gradient, and PPOMetrics
    [5] without."""
    log_probs, values, entropy = PPO.evaluate_actions(params, obs, actions, config=config)
    weights, count = torch.ones_like(advantages), torch.tensor(len(advantages))
    actor = policy_loss(log_probs, old_log_probs, advantages, weights, count, Clip(config.clip_eps, config.clip_eps))
    critic = value_loss(values, old_values, returns, weights, count, clip=config.clip_eps)
    actor_loss, critic_loss, entropy = actor.loss_sum / count, 0.5 * critic.loss_sum / count, entropy.mean()
    total = actor_loss + config.vf_coef * critic_loss - config.ent_coef * entropy
    kl_sum, kl_count = actor.sums["actor/ppo_kl"]
    metrics = (total, actor_loss, critic_loss, entropy, kl_sum / kl_count)
    return total, torch.stack([value.detach().double() for value in metrics])


def _bootstrap(state: PPOState, steps: Sequence[Step], config: PPOConfig) -> Tensor:
    """Return [N]: the value of the final observation of an episode ended by its time limit,
    else 0."""
    truncated = torch.tensor([step.truncated and not step.terminated for step in steps])
    if not truncated.any():
        return torch.zeros(len(steps))
    final = torch.stack([step.final_obs for step in steps])
    return torch.where(truncated, PPO.get_value_batch(state, final, config=config), 0.0)
