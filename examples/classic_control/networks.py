"""Small networks with tanh between layers, and orthogonal weights.

Gains: sqrt 2; 0.01 for logits, 1 for the value.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ActorCategorical(nn.Module):
    """obs [..., obs_dim] -> logits [..., n_actions]."""

    def __init__(self, obs_dim: int, n_actions: int, hidden_sizes: Sequence[int], rng: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_backbone(obs_dim, hidden_sizes, rng), _linear(hidden_sizes[-1], n_actions, 0.01, rng)
        )

    def forward(self, obs: Tensor) -> Tensor:
        return self.layers(obs)


class Critic(nn.Module):
    """obs [..., obs_dim] -> value [...]."""

    def __init__(self, obs_dim: int, hidden_sizes: Sequence[int], rng: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_backbone(obs_dim, hidden_sizes, rng), _linear(hidden_sizes[-1], 1, 1.0, rng))

    def forward(self, obs: Tensor) -> Tensor:
        return self.layers(obs).squeeze(-1)


class ActorCriticParams(nn.Module):
    """Two networks: obs -> (logits, value)."""

    def __init__(self, obs_dim: int, n_actions: int, hidden_sizes: Sequence[int], rng: torch.Generator) -> None:
        super().__init__()
        self.actor = ActorCategorical(obs_dim, n_actions, hidden_sizes, rng)
        self.critic = Critic(obs_dim, hidden_sizes, rng)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(obs), self.critic(obs)


class ActorCriticShared(nn.Module):
    """One backbone with two heads: obs -> (logits, value)."""

    def __init__(self, obs_dim: int, n_actions: int, hidden_sizes: Sequence[int], rng: torch.Generator) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*_backbone(obs_dim, hidden_sizes, rng))
        self.actor_head = _linear(hidden_sizes[-1], n_actions, 0.01, rng)
        self.critic_head = _linear(hidden_sizes[-1], 1, 1.0, rng)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(obs)
        return self.actor_head(features), self.critic_head(features).squeeze(-1)


def _backbone(obs_dim: int, hidden_sizes: Sequence[int], rng: torch.Generator) -> list[nn.Module]:
    sizes = (obs_dim, *hidden_sizes)
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    return [layer for pair in pairs for layer in (_linear(*pair, math.sqrt(2.0), rng), nn.Tanh())]


def _linear(inputs: int, outputs: int, gain: float, rng: torch.Generator) -> nn.Linear:
    # torch's own start would draw from the global generator
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain, generator=rng)
    nn.init.zeros_(layer.bias)
    return layer
