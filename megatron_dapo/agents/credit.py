"""Shares a trajectory's advantage among its branches, by a function of the user (`agent.credit`)."""

from collections.abc import Sequence
from functools import partial

from megatron_dapo.common.own_function import OwnFunction, finite
from megatron_dapo.config.key_names import AGENT
from megatron_dapo.data.batching import Credit
from megatron_dapo.data.samples import Sample

_KEY = f"{AGENT}.credit"


def load_credit(path: str) -> Credit:
    """Return the function at `package.module:name`, with its answers checked.

    It gets a finished trajectory and returns a finite factor per branch, in their order. UserError
    is raised here, or by the function, for anything else.
    """
    return partial(_factors, OwnFunction.load(_KEY, path))


def _factors(function: OwnFunction, sample: Sample) -> Sequence[float]:
    number = len(sample.branches)

    def read(answer: Sequence[float]) -> Sequence[float]:
        factors = tuple(map(finite, answer[: number + 1]))
        if len(factors) != number:
            raise ValueError(answer)
        return factors

    needed = f"{number} finite numbers (one per branch)"
    return function(read, needed, f"a trajectory of group {sample.uid}", sample)
