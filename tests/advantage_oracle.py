"""Advantages by their papers, in plain numbers: one response of a group, or the counted tokens of one response."""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np


class PlainGroup(NamedTuple):
    """The numbers of one group, one per response."""

    rewards: list[float]
    correct: list[bool]
    num_tokens: list[int]
    num_counted: list[int]
    baseline: float


# algorithm.adv_estimator -> advantage of response i
OF_RESPONSE: dict[str, Callable[[PlainGroup, int], float]] = {
    "grpo": lambda group, i: (group.rewards[i] - fmean(group.rewards)) / (stdev(group.rewards) + 1e-6),
    "rloo": lambda group, i: group.rewards[i] - fmean(group.rewards[:i] + group.rewards[i + 1 :]),
    "remax": lambda group, i: group.rewards[i] - group.baseline,
}

Numbers = Sequence[float] | np.ndarray
# algorithm.adv_estimator -> advantages before whitening, from rewards, values, gamma and lam
OF_TOKENS: dict[str, Callable[[Numbers, Numbers, float, float], np.ndarray]] = {
    "gae": lambda rewards, values, gamma, lam: one_episode(rewards, values, gamma, lam),
    "reinforce_plus_plus": lambda rewards, values, gamma, lam: one_episode(rewards, np.zeros(len(values)), gamma, 1.0),
}


def gae_by_definition(
    rewards: Numbers, values: Numbers, mask: Numbers, done: Numbers, last_value: float, gamma: float, lam: float
) -> np.ndarray:
    """arXiv 1506.02438, eq. 16 as it stands: A_t = sum_l (gamma lam)^l delta_(t+l), to the end of the episode, in the
    sequence of the steps that count."""
    advantages = np.zeros(len(rewards))
    counted = [t for t in range(len(rewards)) if mask[t]]
    for place, t in enumerate(counted):
        weight = 1.0
        for step in range(place, len(counted)):
            s = counted[step]
            after = values[counted[step + 1]] if step + 1 < len(counted) else last_value
            delta = rewards[s] + (0.0 if done[s] else gamma * after) - values[s]
            advantages[t] += weight * delta
            weight *= gamma * lam
            if done[s]:
                break
    return advantages


def one_episode(rewards: Numbers, values: Numbers, gamma: float, lam: float) -> np.ndarray:
    """The same where every token counts and the last one ends it."""
    num = len(rewards)
    return gae_by_definition(rewards, values, [True] * num, [False] * num, 0.0, gamma, lam)
