"""The loss of the critic."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dapo.algorithms.metrics import Sums, token_mean
from megatron_dapo.algorithms.policy_loss import LossSums

VALUE_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l2": lambda values, returns: (values - returns).square(),
    "huber": lambda values, returns: F.huber_loss(values, returns, reduction="none"),  # delta 1
}


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    count: Tensor,
    *,
    clip: float | None = 0.2,
    loss_type: str = "l2",
) -> LossSums:
    """Return the clipped value loss, summed, not averaged.

        L = sum_t w_t * max(l(V_t, R_t), l(clamp(V_t, V_old - clip, V_old + clip), R_t))

    In both branches l is l2, (V - R)^2, or huber. Huber is 0.5 (V - R)^2 for |V - R| < 1, and |V -
    R| - 0.5 beyond. clip None: only l(V_t, R_t). l2 has no factor 1/2: the caller's coefficient is
    the only one. PPO's value clipping: arXiv 2005.12729.

    All of one shape; weights and count from `token_weights` (all ones and the number of steps:
    their sum). At weights of 0 neither values nor NaN leak, and gradients are 0. Gradient flows
    through values only.

    Sums: vf_loss per `count`; vf_clipfrac (tokens with the clipped branch larger) and value_mean
    per counted token.
    """
    counted = weights != 0
    values = torch.where(counted, values, 0)
    old_values, returns = (torch.where(counted, x.detach(), 0) for x in (old_values, returns))
    loss = VALUE_LOSSES[loss_type]
    losses = loss(values, returns)
    is_clipped = torch.zeros_like(counted)
    if clip is not None:
        clipped = loss(torch.clamp(values, old_values - clip, old_values + clip), returns)
        is_clipped = clipped > losses
        losses = torch.maximum(losses, clipped)
    weighted = weights * losses
    sums: Sums = {
        "critic/vf_loss": (weighted.detach().sum(dtype=torch.float64), count.double()),
        "critic/vf_clipfrac": token_mean(is_clipped, counted),
        "critic/value_mean": token_mean(values, counted),
    }
    return LossSums(weighted.sum(), sums, {})


def explained_variance_sums(values: Tensor, returns: Tensor, counted: Tensor) -> Sums:
    """Return the sums for the mean return, and for critic/explained_variance by `finalize`.

    The latter is 1 - Var(R - V) / Var(R), or 0 if all returns are equal. values: before the update,
    without gradient; all of one shape, counted: bool.
    """
    residual = (returns - values).double()
    returns = returns.double()
    return {
        "critic/return_mean": token_mean(returns, counted),
        "_return_squared": token_mean(returns.square(), counted),
        "_residual": token_mean(residual, counted),
        "_residual_squared": token_mean(residual.square(), counted),
    }
