"""Advantages of whole responses: group-relative, leave-one-out, against the greedy answer."""

from collections.abc import Callable

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, normalize_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Return how much better each response of one group did than the group.

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
    """Return A_i = R_i - mean of the others = n / (n - 1) * (R_i - mean(R)) (RLOO, arXiv 2402.14740). rewards: [n], as
    above.

    A group of one has no others: its advantage is its reward.
    """
    num = rewards.numel()
    return rewards if num == 1 else (rewards - rewards.mean()) * (num / (num - 1))


def remax_advantages(rewards: Tensor, baseline: float | None) -> Tensor:
    """Return A_i = R_i - baseline, the reward of one greedy answer to the same prompt (ReMax, arXiv 2310.10505).

    rewards: [n], as above.
    """
    assert baseline is not None, "a group for remax has the reward of a greedy answer"
    return rewards - baseline


# algorithm.adv_estimator -> function of a group's rewards [n] after shaping, of the shaped reward of one greedy answer
# to its prompt (remax alone needs it) and of normalize_by_std (see `group_advantages`): one number per response
GROUP_ESTIMATORS: dict[str, Callable[[Tensor, float | None, bool], Tensor]] = {
    "grpo": lambda rewards, baseline, normalize_by_std: group_advantages(rewards, normalize_by_std),
    "rloo": lambda rewards, baseline, normalize_by_std: rloo_advantages(rewards),
    "remax": lambda rewards, baseline, normalize_by_std: remax_advantages(rewards, baseline),
}
