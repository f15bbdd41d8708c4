"""Advantages by a function of the user's own (`algorithm.adv_estimator`): its input and its answer."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, repeat
from typing import Any

import numpy as np

from megatron_dapo.algorithms.estimators import GroupRewards
from megatron_dapo.common.own_function import OwnFunction
from megatron_dapo.config.key_names import ESTIMATOR
from megatron_dapo.data.samples import Branch

Advantage = float | np.ndarray
"""Of all tokens of a response, or of each."""


@cache
def load_own_estimator(path: str) -> OwnFunction:
    """Import the function. Raises UserError with one sentence."""
    return OwnFunction.load(ESTIMATOR, path)


def own_estimates(estimator: OwnFunction, group: GroupRewards, uid: str) -> list[np.ndarray]:
    """Return the advantages of each response, [] or [T_i]. Raises UserError for an exception of the
    function, and for another answer."""

    def read(answer: Sequence[Any]) -> list[np.ndarray]:
        rows = [np.asarray(row, dtype=np.float64) for row in answer]
        shapes = [((), (len(log_probs),)) for log_probs in group.log_probs]
        fits = len(rows) == len(shapes) and all(row.shape in two for row, two in zip(rows, shapes, strict=True))
        if not fits or not all(np.isfinite(row).all() for row in rows):
            raise ValueError(answer)
        return rows

    lengths = ", ".join(str(len(each)) for each in group.log_probs)
    needed = f"{len(group.log_probs)} finite numbers or arrays (a number per token: {lengths})"
    return estimator(read, needed, f"group {uid}", group)


def by_branch(advantage: np.ndarray, branches: Sequence[Branch]) -> Iterable[Advantage]:
    """Return the advantages of each branch: of its tokens, or the response's one number."""
    if advantage.ndim == 0:
        return repeat(float(advantage), len(branches))
    ends = accumulate(len(branch.response_tokens) for branch in branches)
    return np.split(advantage, list(ends)[:-1])
