"""Advantages of whole responses, from the responses of one group."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

EPS = 1e-6  # of the public DAPO recipe


@dataclass(frozen=True)
class GroupRewards:
    """The responses of one group, as its estimator's input. Tensors are [n] float64.

    In float32, the mean of equal rewards would be off by a rounding error; division by a small
    deviation blows it up.
    """

    rewards: Tensor
    """After overlong shaping, and minus a KL penalty in the reward."""
    correct: Tensor
    """1 for a right response, else 0."""
    num_tokens: Tensor
    """Length of each response, with an environment's tokens; 0 of an empty one."""
    num_counted: Tensor
    """Tokens of each response written by the model."""
    baseline: float | None = None
    """Shaped reward of a greedy response to the prompt, for an estimator that `needs_baseline`."""
    normalize_by_std: bool = True
    """`algorithm.norm_adv_by_std_in_grpo`."""
    log_probs: tuple[Tensor, ...] = ()
    """For an estimator of the user's own: of the tokens of each response, by its server, [T_i]
    float32; of a trajectory's branches, one after the other."""
    masks: tuple[Tensor, ...] = ()
    """For the same: 1 at the model's tokens; 0, with log-probs of 0, at an environment's."""
    extra_info: dict = field(default_factory=dict)
    """For the same: of the prompt's row."""


def grpo(group: GroupRewards) -> Tensor:
    """Return A_i = (R_i - mean(R)) / (std(R) + EPS), [n], std unbiased.

    A group of one has mean 0 and std 1. GRPO (arXiv 2402.03300) with the conventions of the public
    DAPO recipe; without normalize_by_std, A_i = R_i - mean(R): Dr. GRPO (arXiv 2503.20783).
    """
    rewards = group.rewards
    alone = rewards.numel() == 1
    centered = rewards if alone else rewards - rewards.mean()
    if not group.normalize_by_std:
        return centered
    std = torch.ones_like(rewards) if alone else rewards.std(unbiased=True)
    return centered / (std + EPS)


def rloo(group: GroupRewards) -> Tensor:
    """Return A_i = R_i - mean of the others = n / (n - 1) * (R_i - mean(R)), [n].

    A group of one has no others: its advantage is its reward. RLOO (arXiv 2402.14740).
    """
    rewards, num = group.rewards, group.rewards.numel()
    return rewards if num == 1 else (rewards - rewards.mean()) * (num / (num - 1))


def remax(group: GroupRewards) -> Tensor:
    """Return A_i = R_i - baseline, [n] (ReMax, arXiv 2310.10505)."""
    assert group.baseline is not None, "a group for remax has the reward of a greedy answer"
    return group.rewards - group.baseline


def maxrl(group: GroupRewards) -> Tensor:
    """Return A_i = (R_i - mean(R)) / mean(R), [n]; 0 if the mean is not above 0.

    MaxRL (arXiv 2602.02710), for rewards of 1 and 0: the rarer right responses are,
    the more one weighs. Other rewards may be any numbers from 0.
    """
    mean = group.rewards.mean()
    return torch.where(mean > 0, (group.rewards - mean) / mean, 0.0)
