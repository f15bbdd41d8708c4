"""Metrics as sums with their own counts.

They are added over micro-batches, reduced once over ranks and divided at the very end.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Sums = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count), float64 scalars on the device
Maxima = dict[str, Tensor]  # name -> float64 scalar, never negative; 0 if nothing was counted


def _effective_share(mean: float, square: float) -> float:
    return mean**2 / square


def _explained_variance(mean: float, square: float, residual: float, residual_square: float) -> float:
    variance = square - mean**2
    is_constant = variance <= 1e-12 * square  # up to the rounding of the two means
    return 0.0 if is_constant else 1.0 - (residual_square - residual**2) / variance


# Metrics computed from finished means: name -> (needed means, function). Means with a leading "_"
# are dropped.
DERIVED: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "actor/rollout_ess": (("_rollout_weight", "_rollout_weight_squared"), _effective_share),
    "actor/rollout_ess_stale": (("_rollout_weight_stale", "_rollout_weight_squared_stale"), _effective_share),
    "actor/rollout_ess_all": (("_rollout_weight_all", "_rollout_weight_squared_all"), _effective_share),
    "critic/explained_variance": (
        ("critic/return_mean", "_return_squared", "_residual", "_residual_squared"),
        _explained_variance,
    ),
}


def masked_sum(values: Tensor, counted: Tensor) -> Tensor:
    """Sum the values [...] at counted [...], in float64; NaN elsewhere does not leak."""
    return torch.where(counted, values.detach(), 0).sum(dtype=torch.float64)


def token_mean(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum over the counted tokens, their number): a metric with a mean over tokens."""
    return masked_sum(values, counted), counted.sum(dtype=torch.float64)


def masked_max(values: Tensor, counted: Tensor) -> Tensor:
    """Return the largest of the non-negative values [...] at counted ones, in float64.

    0 if nothing counts.
    """
    kept = torch.where(counted, values.detach(), 0).double()
    return kept.max() if kept.numel() else kept.sum()


def stack_sums(sums: Mapping[str, tuple[Tensor, Tensor]], names: Sequence[str], device: torch.device | str) -> Tensor:
    """Stack sums into [len(names), 2] float64, ready for one all-reduce (SUM).

    A name without a sum gives zeros.
    """
    rows = [torch.stack([torch.as_tensor(x, device=device).double() for x in sums.get(name, (0, 0))]) for name in names]
    return torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64, device=device)


def unstack_sums(stacked: Tensor, names: Sequence[str]) -> Sums:
    """Undo stack_sums."""
    return {name: (row[0], row[1]) for name, row in zip(names, stacked, strict=True)}


def stack_maxima(maxima: Mapping[str, Tensor], names: Sequence[str], device: torch.device | str) -> Tensor:
    """Stack maxima into [len(names)] float64, ready for one all-reduce (MAX)."""
    return torch.stack([torch.as_tensor(maxima.get(name, 0), device=device).double() for name in names])


def unstack_maxima(stacked: Tensor, names: Sequence[str]) -> Maxima:
    """Undo stack_maxima."""
    return dict(zip(names, stacked, strict=True))


def finalize(sums: Mapping[str, tuple[Tensor, Tensor]], maxima: Mapping[str, Tensor] | None = None) -> dict[str, float]:
    """Return flat floats: sum / count for each sum, the maxima as they are, and DERIVED.

    Sums with a count of 0 are left out.
    """
    means = {name: float(total) / float(count) for name, (total, count) in sums.items() if float(count)}
    for name, (needed, function) in DERIVED.items():
        if all(part in means for part in needed):
            means[name] = function(*(means[part] for part in needed))
    shown = {name: value for name, value in means.items() if not name.startswith("_")}
    return {**shown, **{name: float(value) for name, value in (maxima or {}).items()}}
