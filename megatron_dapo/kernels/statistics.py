"""Statistics of each rank's share of a row of logits, and their merge into log-prob and entropy.

With x = logit / temperature over this rank's share of the vocabulary, four numbers per row:

    m = max x,   s = sum e^(x-m),   u = sum (x-m) e^(x-m),
    x_t = x[target], or -inf if another rank holds it.

A rank without a valid column has m = -inf, s = u = 0. Shares are merged in rank order, so all ranks
compute equal bits:

    M = max m_r,  S = sum e^(m_r-M) s_r,  U = sum e^(m_r-M) (u_r + (m_r-M) s_r)
    log p = (x_t - M) - log S,   H = log S - U / S.

Differences to M are taken before additions, so a common offset of the logits loses no digits. The
gradient is

    dL/dlogit_j = 1/temperature * [ g_lp (1[j=t] - p_j) - g_H p_j (log p_j + H)
                                    + g_KL p_j (log p_j - log q_j - KL) ],

the last term only with the KL = sum_j p_j (log p_j - log q_j) to another model's q. It consists of
differences of single logits: exactly 0 between equal models, and precise for small KL.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Merged(NamedTuple):
    """Statistics per row, [N] each."""

    top: Tensor
    """M."""
    log_s: Tensor
    """log S."""
    entropy: Tensor
    """H; meaningless if u was not requested."""
    log_prob: Tensor
    """log p <= 0."""


def empty_share(num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [N, 4]: the statistics of a share without a valid column."""
    stats_N4 = torch.zeros(num_rows, 4, dtype=dtype, device=device)
    stats_N4[:, 0] = stats_N4[:, 3] = float("-inf")
    return stats_N4


def merge(stats_RN4: Tensor) -> Merged:
    """Merge the statistics of all shares, in rank order: float32, or float64 for float64
    statistics.

    Shares are added one after the other. The order of additions in `sum(0)` depends on N, and so
    would a row's bits.
    """
    m, s, u, x_t = stats_RN4.unbind(-1)
    top = m.amax(0)
    shift = torch.where(m == float("-inf"), float("-inf"), m - top)
    scale = shift.exp()
    sums = scale * s
    weighted = scale * (u + torch.where(scale > 0, shift, 0.0) * s)
    total = sums[0]
    total_weighted = weighted[0]
    for share in range(1, len(m)):
        total = total + sums[share]
        total_weighted = total_weighted + weighted[share]
    log_s = total.log()
    return Merged(top, log_s, log_s - total_weighted / total, ((x_t.amax(0) - top) - log_s).clamp_max(0.0))


def sum_over(shares_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return [N]: the ranks' shares of one number per row, added in rank order."""
    if group is None or group.size() == 1 or not shares_N.numel():
        return shares_N
    gathered = shares_N.new_empty((group.size(), shares_N.numel()))
    dist.all_gather_into_tensor(gathered.view(-1), shares_N.contiguous(), group=group)
    total = gathered[0]
    for share in gathered[1:]:
        total = total + share
    return total


def merge_over(stats_N4: Tensor, group: dist.ProcessGroup | None) -> Merged:
    """Do `merge` over the ranks of `group`: one all-gather of [N, 4]. Every rank brings the same N,
    zero included."""
    if group is None or group.size() == 1 or not stats_N4.size(0):
        return merge(stats_N4[None])
    gathered = stats_N4.new_empty((group.size(), *stats_N4.shape))
    dist.all_gather_into_tensor(gathered.view(-1, 4), stats_N4.contiguous(), group=group)
    return merge(gathered)
