"""Advantages by their papers, in plain numbers, for one response of a group
or its counted tokens."""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from megatron_dapo.config.built_ins import ESTIMATORS, estimators_with


class PlainGroup(NamedTuple):
    """The numbers of one group, one per response."""

    rewards: list[float]
    correct: list[bool]
    num_tokens: list[int]
    num_counted: list[int]
    baseline: float
    normalize_by_std: bool = True


def _grpo(group: PlainGroup, i: int) -> float:
    """Of a group of one the mean is 0 and the deviation 1."""
    alone = len(group.rewards) == 1
    mean, std = (0.0, 1.0) if alone else (fmean(group.rewards), stdev(group.rewards))
    return (group.rewards[i] - mean) / (std + 1e-6 if group.normalize_by_std else 1.0)


def _maxrl(group: PlainGroup, i: int) -> float:
    """arXiv 2602.02710, algorithm 1: nothing is learned from a group without a right response."""
    mean = fmean(group.rewards)
    return (group.rewards[i] - mean) / mean if mean > 0 else 0.0


# algorithm.adv_estimator -> advantage of response i
OF_RESPONSE: dict[str, Callable[[PlainGroup, int], float]] = {
    "grpo": _grpo,
    "rloo": lambda group, i: group.rewards[i] - fmean(group.rewards[:i] + group.rewards[i + 1 :] or [0.0]),
    "remax": lambda group, i: group.rewards[i] - group.baseline,
    "maxrl": _maxrl,
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
    """arXiv 1506.02438, eq. 16 as it stands: A_t = sum_l (gamma lam)^l delta_(t+l). The sum runs to
    the end of the episode, over counted steps only."""
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
    """The same with every token counted, the last one ending the episode."""
    num = len(rewards)
    return gae_by_definition(rewards, values, [True] * num, [False] * num, 0.0, gamma, lam)


def check_group_estimators(module: ModuleType) -> None:
    """Raise AssertionError unless the functions
    of `algorithms/estimators.py` equal the plain ones."""
    rng = np.random.default_rng(0)
    for num, scale in ((1, 1.0), (2, 1.0), (3, 1.0), (8, 1.0), (4, 0.0)):
        rewards, lengths = (scale * rng.normal(size=num)).tolist(), list(range(num))  # one response is empty
        plain = PlainGroup(rewards, [reward > 0 for reward in rewards], lengths, [n - n // 3 for n in lengths], 0.25)
        columns = [torch.tensor(column, dtype=torch.float64) for column in plain[:4]]
        groups = [(plain, {}), (plain._replace(normalize_by_std=False), {"normalize_by_std": False})]
        for wanted, others in groups:
            group = module.GroupRewards(*columns, baseline=0.25, **others)
            for name in estimators_with(per_token=False):
                advantages = [OF_RESPONSE[name](wanted, i) for i in range(num)]
                np.testing.assert_allclose(_function(module, name)(group), advantages, rtol=1e-9, atol=1e-12)


def check_token_estimators(module: ModuleType) -> None:
    """Raise AssertionError unless the functions of `algorithms/gae.py` equal the plain ones."""
    rng = np.random.default_rng(0)
    for num in (1, 2, 7, 13):
        rewards, values = rng.normal(size=(2, num))
        mask, done = rng.random((2, num)) < 0.6
        _check_gae(module, rewards, values, mask, done, 0.5)
        advantages, _ = module.gae(torch.tensor(rewards), torch.tensor(values), gamma=0.9, lam=0.8)
        np.testing.assert_allclose(advantages, one_episode(rewards, values, 0.9, 0.8), rtol=1e-9, atol=1e-12)
        mask[:3] = [True, False, False][:num]  # only the first token of the first response
        _check_packed(module, rewards, values, mask, np.arange(num) // 3)


def _check_gae(module: ModuleType, rewards, values, mask, done, last_value: float) -> None:
    """With NaN at all uncounted places."""
    columns = [torch.tensor(np.where(mask, column, np.nan)) for column in (rewards, values)]
    flags = {"mask": torch.tensor(mask), "done": torch.tensor(done), "last_value": torch.tensor(last_value)}
    wanted = gae_by_definition(rewards, values, mask, done, last_value, 0.9, 0.8)
    got = module.gae(*columns, gamma=0.9, lam=0.8, **flags)
    for result, expected in zip(got, (wanted, wanted + np.where(mask, values, 0.0)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-12)


def _check_packed(module: ModuleType, rewards, values, mask, segments) -> None:
    """In one row with responses before and after, some without a counted token."""
    row = [torch.tensor(column)[None] for column in (rewards, mask, values)]
    num_segments = int(segments[-1]) + 1
    is_end = module.last_counted(row[1], torch.tensor(segments)[None], num_segments)
    for name in estimators_with(per_token=True):
        tokens = module.TokenRewards(row[0], row[1], is_end, row[2], 0.9, 0.8)
        advantages, returns = (result[0].numpy() for result in _function(module, name)(tokens))
        for segment in range(num_segments):
            here = mask & (segments == segment)
            assert (
                np.flatnonzero(is_end[0] & torch.tensor(segments == segment)).tolist() == [*np.flatnonzero(here)][-1:]
            )
            wanted = OF_TOKENS[name](rewards[here], values[here], 0.9, 0.8)
            np.testing.assert_allclose(advantages[here], wanted, rtol=1e-9, atol=1e-12)
            wanted = wanted + values[here] * ESTIMATORS[name].needs_critic
            np.testing.assert_allclose(returns[here], wanted, rtol=1e-9, atol=1e-12)


def _function(module: ModuleType, name: str) -> Callable:
    return getattr(module, ESTIMATORS[name].function.partition(":")[2])
