"""Whitening: mean 0 and standard deviation 1 over every counted token, in any place."""

import torch
from torch import Tensor


def moments(values: Tensor, counted: Tensor) -> Tensor:
    """Return [3] float64: number, sum and sum of squares of values [...] at non-zero counted [...].

    NaN elsewhere does not leak. Add them over pieces and ranks (each token once) before `whiten`.
    """
    counted = counted != 0
    kept = torch.where(counted, values.detach().double(), 0)
    return torch.stack([counted.sum(dtype=torch.float64), kept.sum(), kept.square().sum()])


def mean_and_variance(total: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 scalars from the result of `moments`, the variance with n - 1.

    (0, 0) of nothing, variance 0 of one value.
    """
    num, total_sum, squares = total.unbind()
    mean = total_sum / num.clamp(min=1)
    return mean, ((squares - num * mean.square()) / (num - 1).clamp(min=1)).clamp(min=0)


def whiten(values: Tensor, total: Tensor, eps: float = 1e-8) -> Tensor:
    """Return (values - mean) / sqrt(variance + eps), of the same dtype.

    The variance has n - 1, as in verl's masked_whiten. total: the `moments` of all values together,
    on the same device. For a single value, or equal ones, the result is 0. Uncounted values come
    out scaled, too: the caller ignores them.
    """
    mean, variance = mean_and_variance(total)
    return ((values.double() - mean) * torch.rsqrt(variance + eps)).to(values.dtype)
