"""Advantages of whole responses: group-relative, leave-one-out, against the greedy answer."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, normalize_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """How much better each response of one group did than the group.

    A_i = (R_i - mean(R)) / (std(R) + eps), std unbiased (n - 1); a group of one has mean 0 and std 1 (GRPO, arXiv
    2402.03300, with the conventions of the public DAPO recipe). normalize_by_std=False: A_i = R_i - mean(R) (Dr. GRPO,
    arXiv 2503.20783).

    rewards: [n], after shaping. Returns [n] of the same dtype; pass float64: in float32 the mean of equal rewards is
    off by a rounding error, which the division by eps blows up.
    """
    alone = rewards.numel() == 1
    centered = rewards if alone else rewards - rewards.mean()
    if not normalize_by_std:
        return centered
    std = torch.ones_like(rewards) if alone else rewards.std(unbiased=True)
    return centered / (std + eps)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """A_i = R_i - mean of the others = n / (n - 1) * (R_i - mean(R)) (RLOO, arXiv 2402.14740). rewards: [n], as above.

    A group of one has no others: its advantage is its reward.
    """
    num = rewards.numel()
    return rewards if num == 1 else (rewards - rewards.mean()) * (num / (num - 1))


class GroupRewards(NamedTuple):
    """The rewards [n] of one group after shaping, and what an estimator may need beside them.

    baseline: the shaped reward of one greedy answer to the same prompt (remax). by_std: see `group_advantages`.
    """

    rewards: Tensor
    baseline: float | None = None
    by_std: bool = True


# algorithm.adv_estimator -> one number per response. remax: arXiv 2310.10505.
GROUP_ESTIMATORS: dict[str, Callable[[GroupRewards], Tensor]] = {
    "grpo": lambda group: group_advantages(group.rewards, group.by_std),
    "rloo": lambda group: rloo_advantages(group.rewards),
    "remax": lambda group: group.rewards - group.baseline,
}
