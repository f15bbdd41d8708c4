"""How far a step's samples are from the policy before it learns from them: in all, and by
sample."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.algorithms.metrics import Sums, token_mean
from megatron_dapo.algorithms.mismatch_sums import MEAN_MISMATCH_ALL
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.platform.parallel import ParallelLayout

Shares = dict[int, tuple[float, int]]
"""sample_id -> sum of |trainer's - server's log-prob| over its tokens, and their number."""
_FEW = 0.5
_MANY = 0.5


def compared(batch: MicroBatch, weight_version: int) -> Tensor:
    """Return the mask of counted tokens by this weight version.

    There server and trainer must agree.
    """
    return (batch.loss_mask != 0) & (batch.weight_versions == weight_version) & (batch.exp_mask == 0)


def stale(batch: MicroBatch, weight_version: int) -> Tensor:
    """Return the mask of counted tokens by older weights in this rollout, without replayed ones."""
    return (batch.loss_mask != 0) & (batch.weight_versions < weight_version) & (batch.exp_mask == 0)


def _checked(batch: MicroBatch, weight_version: int, with_stale: bool) -> Tensor:
    """Return the mask of tokens for `max_mismatch`: the `compared` ones, and with_stale older
    weights' too.

    If rollouts run ahead, hardly any response is by the newest weights. Without older weights'
    tokens, responses of another model would pass unseen.
    """
    counts = compared(batch, weight_version)
    return counts | stale(batch, weight_version) if with_stale else counts


def step_warnings(config: Config, metrics: Mapping[str, float]) -> list[str]:
    """Return warnings about a step; none for synthetic batches, which have no server."""
    if config.trainer.synthetic_batch:
        return []
    return list(filter(None, (few_effective_tokens(metrics), _mostly_rejected(metrics))))


def few_effective_tokens(metrics: Mapping[str, float]) -> str | None:
    """Return a warning if the effective sample size over all of a step's tokens is less than half
    their number: it falls before a run collapses (arXiv 2602.17616)."""
    of_newest, of_all = metrics.get("actor/rollout_ess", 1.0), metrics.get("actor/rollout_ess_all")
    share = of_newest if of_all is None else of_all
    if share >= _FEW:
        return None
    cure = "see to it that servers run the trainer's model"
    if of_all is not None:
        cure = "lower actor_rollout_ref.rollout.max_staleness"
    return (
        f"the servers' log-probs are so far from the trainer's that, weighed by their ratio, the step's tokens are "
        f"worth {share:.0%} of their number; {cure}, or see "
        f"algorithm.rollout_correction in docs/loss.md."
    )


def _mostly_rejected(metrics: Mapping[str, float]) -> str | None:
    """Return a warning if most tokens are rejected, so that the step hardly teaches anything."""
    share = metrics.get("actor/rollout_rs_token_masked", 0.0)
    if share <= _MANY:
        return None
    return (
        f"algorithm.rollout_correction rejects {share:.0%} of the step's tokens; widen rollout_rs_threshold, or lower "
        f"rollout_token_veto_threshold."
    )


def difference_sums(batches: Iterable[MicroBatch], weight_version: int, *, with_stale: bool = False) -> Tensor | None:
    """Return [sum of |old - server's log-prob|, number of tokens] over the `_checked` tokens. None
    without old log-probs, as on all stages but the last."""
    parts = []
    for batch in batches:
        if batch.old_log_probs is not None:
            counts = _checked(batch, weight_version, with_stale)
            parts.append(torch.stack([_differences(batch, batch.old_log_probs, counts).sum(), counts.sum().double()]))
    return torch.stack(parts).sum(0) if parts else None


def mean_over_ranks(sums: Tensor | None, layout: ParallelLayout, device: torch.device) -> float:
    """Return the mean over all ranks, each token once; 0 without any. Collective over all ranks,
    the same on all of them."""
    if sums is None or not layout.counts_tokens:
        sums = torch.zeros(2, dtype=torch.float64, device=device)
    dist.all_reduce(sums := sums.clone())
    total, number = sums.tolist()
    return total / number if number else 0.0


def all_mismatch_sums(batch: MicroBatch, log_probs: Tensor, weight_version: int) -> Sums:
    """Return the metric sums checked if older weights wrote tokens, too.

    They give the mean of |trainer's - server's log-prob| over all counted tokens of this rollout.
    log_probs: the current ones, [B, S] like the batch's.
    """
    counts = _checked(batch, weight_version, with_stale=True)
    return {MEAN_MISMATCH_ALL: token_mean(_differences(batch, log_probs, counts), counts)}


def shares_of(
    batches: Sequence[MicroBatch], log_probs: Sequence[Tensor], weight_version: int, *, with_stale: bool = False
) -> Shares:
    """Return the shares of every sample that has `_checked` tokens."""
    shares: Shares = {}
    for batch, ours in zip(batches, log_probs, strict=True):
        counts = _checked(batch, weight_version, with_stale)
        numbers = batch.by_sample(counts)
        for sample_id, values in batch.by_sample(_differences(batch, ours, counts)).items():
            if number := int(numbers[sample_id].sum()):
                shares[sample_id] = float(values.sum()), number
    return shares


def _differences(batch: MicroBatch, log_probs: Tensor, counts: Tensor) -> Tensor:
    return torch.where(counts, (log_probs.double() - batch.rollout_log_probs.double()).abs(), 0.0)
