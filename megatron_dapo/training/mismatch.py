"""How far a step's samples are from the policy that is to learn from them, before it does: in all, and by sample."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.platform.parallel import ParallelLayout

Shares = dict[int, tuple[float, int]]
"""sample_id -> sum of |trainer's - server's log-prob| over its tokens, and their number."""


def compared(batch: MicroBatch, weight_version: int) -> Tensor:
    """Return where the weights of this version wrote a token that counts: there server and trainer must agree."""
    return (batch.loss_mask != 0) & (batch.weight_version == weight_version) & (batch.exp_mask == 0)


def difference_sums(batches: Iterable[MicroBatch], weight_version: int) -> Tensor | None:
    """Return [sum of |old - server's log-prob|, number of tokens] of micro-batches that have old log-probs; none where
    they have none: on other stages than the last."""
    parts = []
    for batch in batches:
        if batch.old_log_probs is not None:
            counts = compared(batch, weight_version)
            parts.append(torch.stack([_differences(batch, batch.old_log_probs, counts).sum(), counts.sum().double()]))
    return torch.stack(parts).sum(0) if parts else None


def mean_over_ranks(sums: Tensor | None, layout: ParallelLayout, device: torch.device) -> float:
    """Return the mean over all ranks, each token once; 0 without any. Collective over all ranks, the same on all of
    them."""
    if sums is None or layout.tp_rank != 0:
        sums = torch.zeros(2, dtype=torch.float64, device=device)
    dist.all_reduce(sums := sums.clone())
    total, number = sums.tolist()
    return total / number if number else 0.0


def shares_of(batches: Sequence[MicroBatch], log_probs: Sequence[Tensor], weight_version: int) -> Shares:
    """Return the shares of every sample that has such tokens."""
    found: Shares = {}
    for batch, ours in zip(batches, log_probs, strict=True):
        counts = compared(batch, weight_version)
        numbers = batch.by_sample(counts)
        for sample_id, values in batch.by_sample(_differences(batch, ours, counts)).items():
            if number := int(numbers[sample_id].sum()):
                found[sample_id] = float(values.sum()), number
    return found


def _differences(batch: MicroBatch, log_probs: Tensor, counts: Tensor) -> Tensor:
    return torch.where(counts, (log_probs.double() - batch.rollout_log_probs.double()).abs(), 0.0)
