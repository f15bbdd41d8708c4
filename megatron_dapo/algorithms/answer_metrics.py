"""A model's quality from several answers per prompt: avg@n, pass@k, maj@n, with intervals.

The intervals are over the prompts.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

LEVEL = 0.95  # of the intervals
_NUM_RESAMPLES = 10_000
_RESAMPLED_PROMPTS = 4_000_000  # drawn at once: 32 MB


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, with its interval; fewer than two prompts have none."""

    value: float
    low: float | None = None
    high: float | None = None


def pass_ks(num_answers: int) -> list[int]:
    """Return the k of pass@k for n answers per prompt: 1, 4, 8, 16 ... below n, and n."""
    doubled = [4 << power for power in range(num_answers.bit_length()) if 4 << power < num_answers]
    return sorted({1, *doubled, num_answers})


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Return the chance of a right answer among k, drawn from a prompt's n without putting back.

    1 - C(n - c, k) / C(n, k): without bias for the chance of k new answers. Chen et al. 2021 (arXiv
    2107.03374).
    """
    return 1.0 - comb(num_answers - num_right, k) / comb(num_answers, k)


def majority(votes: Sequence[Hashable | None], right: Sequence[bool]) -> float:
    """Return the correctness of a prompt's most frequent answer.

    Equally frequent answers count alike: the expected value of a fair draw among them. An answer
    called right once and wrong once counts by its share. None votes for nothing; with only such
    votes the result is 0.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    winners = [
        is_right for vote, is_right in zip(votes, right, strict=True) if vote is not None and counts[vote] == most
    ]
    return sum(winners) / len(winners) if winners else 0.0


def scores(votes: Sequence[Hashable | None], right: Sequence[bool]) -> dict[str, float]:
    """Return avg@n, pass@k of every k above 1 and, of several answers, maj@n of one prompt.

    votes: the content of its n answers, in a form that makes equal answers equal. right: whether
    each is right.
    """
    num = len(right)
    num_right = sum(map(bool, right))
    passed = {f"pass@{k}": pass_at_k(num, num_right, k) for k in pass_ks(num) if k > 1}
    return {f"avg@{num}": num_right / num, **passed, **({f"maj@{num}": majority(votes, right)} if num > 1 else {})}


def estimates(rows: Sequence[Mapping[str, float]], seed: int = 0) -> dict[str, Estimate]:
    """Return each column's mean and interval: percentiles of the bootstrap over prompts.

    rows: one per prompt, with the same columns; no rows, no estimates. The same rows and seed give
    the same intervals.
    """
    if not rows:
        return {}
    names = list(rows[0])
    values_PM = np.array([[row[name] for name in names] for row in rows], np.float64)
    means_M = values_PM.mean(axis=0)
    if len(rows) < 2:
        return {name: Estimate(float(mean)) for name, mean in zip(names, means_M, strict=True)}
    low_M, high_M = _intervals(values_PM, seed)
    columns = zip(names, means_M.tolist(), low_M.tolist(), high_M.tolist(), strict=True)
    return {name: Estimate(mean, low, high) for name, mean, low, high in columns}


def _intervals(values_PM: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper bounds [M] of the means over prompts drawn with putting back."""
    num_prompts = len(values_PM)
    generator = np.random.default_rng(seed)
    chances = np.full(num_prompts, 1.0 / num_prompts)
    means = []
    num_left = _NUM_RESAMPLES
    while num_left:
        num = min(num_left, max(1, _RESAMPLED_PROMPTS // num_prompts))
        times_drawn = generator.multinomial(num_prompts, chances, size=num)
        means.append(times_drawn @ values_PM / num_prompts)
        num_left -= num
    tail = (1.0 - LEVEL) / 2
    low_M, high_M = np.quantile(np.concatenate(means), [tail, 1.0 - tail], axis=0)
    return low_M, high_M
