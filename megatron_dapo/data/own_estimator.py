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

_LARGEST = float(np.finfo(np.float32).max)  # the loss computes with float32


@cache
def load_own_estimator(path: str) -> OwnFunction:
    """Import the function. Raises UserError with one sentence."""
    return OwnFunction.load(ESTIMATOR, path)


def own_estimates(estimator: OwnFunction, group: GroupRewards, uid: str) -> list[Advantage]:
    """Return the advantages of each response, a number or [T_i]. Raises UserError for an exception of the
    function, and for another answer."""

    def read(answer: Sequence[Any]) -> list[Advantage]:
        rows = [np.asarray(row) for row in answer[:]]  # a set has no order, and a mapping gives its keys
        shapes = [((), (len(log_probs),)) for log_probs in group.log_probs]
        fits = len(rows) == len(shapes) and all(row.shape in two for row, two in zip(rows, shapes, strict=True))
        if not fits or not all(row.dtype.kind in "iuf" and (abs(row) <= _LARGEST).all() for row in rows):
            raise ValueError(answer)
        return [row.astype(np.float64) if row.ndim else float(row) for row in rows]

    lengths = ", ".join(str(len(each)) for each in group.log_probs)
    needed = f"{len(group.log_probs)} finite numbers or arrays (a number per token: {lengths})"
    return estimator(read, needed, f"group {uid}", group)


def by_branch(advantage: Advantage, branches: Sequence[Branch]) -> Iterable[Advantage]:
    """Return the advantages of each branch: of its tokens, or the response's one number over and
    over."""
    if not isinstance(advantage, np.ndarray):
        return repeat(advantage)
    ends = accumulate(len(branch.response_tokens) for branch in branches)
    return np.split(advantage, list(ends)[:-1])
