"""Thresholds of `algorithm.rollout_correction`: a number, or a text lower_upper as in verl."""

import math
from itertools import pairwise
from typing import NamedTuple

from megatron_dapo.config.schema.algorithm import RolloutCorrectionConfig


class Bounds(NamedTuple):
    low: float | None
    high: float


def ratio_bounds(threshold: float | str) -> Bounds:
    """Return the bounds of a threshold. A number, quoted or not, has no lower one.

    Raises ValueError for a text other than a number above 0, or lower_upper with 0 < lower < upper.
    """
    if isinstance(threshold, float):
        return Bounds(None, threshold)
    numbers = [float(part) for part in threshold.split("_")]
    if len(numbers) > 2 or not all(a < b for a, b in pairwise([0.0, *numbers, math.inf])):
        raise ValueError(f"{threshold} is not in ascending order")
    return Bounds(numbers[0] if len(numbers) == 2 else None, numbers[-1])


def rejection_bounds(section: RolloutCorrectionConfig) -> Bounds:
    """Return the bounds kept by `rollout_rs`. For a ratio with one number x the lower bound is 1/x.

    Raises ValueError for a threshold unfit for the mode.
    """
    threshold = section.rollout_rs_threshold
    if section.rollout_rs == "none":
        return Bounds(None, math.inf)
    if threshold is None:
        raise ValueError("nothing says what is rejected")
    bounds = ratio_bounds(threshold)
    if section.rollout_rs == "seq_mean_k3":
        if bounds.low is not None:
            raise ValueError("a divergence has an upper bound alone")
        return bounds
    return bounds if bounds.low is not None else ratio_bounds(f"{1 / bounds.high}_{bounds.high}")
