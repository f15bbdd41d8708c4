"""The agent's config, state, transitions and metrics."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from examples.classic_control.networks import ActorCriticParams, ActorCriticShared


@dataclass(frozen=True)
class PPOConfig:
    """Settings, frozen and hashable."""

    hidden_sizes: tuple[int, ...] = (64, 64)
    lr: float = 2.5e-4  # of Adam
    max_grad_norm: float = 0.5
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_eps: float = 0.2  # of the ratio and of the value
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    n_steps: int = 128  # per environment and rollout
    n_minibatches: int = 4
    n_epochs: int = 4
    num_envs: int = 1
    shared_backbone: bool = False


class PPOState(NamedTuple):
    """The whole state of the agent. A method does not change it but returns a new one."""

    params: ActorCriticParams | ActorCriticShared
    opt_state: torch.optim.Adam
    step: int  # updates so far
    rng: torch.Generator


class PPOTransition(NamedTuple):
    """One step, or a rollout: [T] from one environment, [T, N] from several; obs with its own shape
    behind."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    done: Tensor  # the episode ended here, by its rules or by its time limit
    log_prob: Tensor
    value: Tensor
    bootstrap: Tensor  # after a time limit the next observation's value, else 0


class PPOMetrics(NamedTuple):
    """Means over the mini-batches of one update."""

    total_loss: float
    actor_loss: float
    critic_loss: float
    entropy: float
    approx_kl: float  # mean of old - new log-prob
