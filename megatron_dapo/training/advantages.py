"""Advantages that need the models' scores: the KL penalty inside the reward, and estimates per
token.

Estimates over a group without a KL penalty are finished when the groups are assembled
(data/batching.py).
"""

import pkgutil
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.algorithms.gae import TokenRewards, last_counted
from megatron_dapo.algorithms.kl import FULL_KL, FixedKLController, kl_penalty
from megatron_dapo.algorithms.whitening import mean_and_variance, moments, whiten
from megatron_dapo.config.derived import advantage_estimator, uses_kl_in_reward
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.batching import group_estimates
from megatron_dapo.data.own_estimator import Advantage
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.platform.device import device
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.distribute import StepShard


def estimate_advantages(
    shard: StepShard, controller: FixedKLController, config: Config, layout: ParallelLayout
) -> tuple[StepShard, dict[str, float]]:
    """Return the shard with the advantages (and returns) for its loss, and metrics; update the
    controller of the KL coefficient. Collective over all ranks.

    A KL penalty in the reward needs old and reference log-probs; gae needs the critic's values.
    They are on the last stage, like the loss. The results do not depend on the cut of the step.
    """
    if advantage_estimator(config).per_token:
        return _per_token(shard, controller, config, layout)
    if uses_kl_in_reward(config):
        return _per_group(shard, controller, config, layout)
    return shard, {}


def _per_token(
    shard: StepShard, controller: FixedKLController, config: Config, layout: ParallelLayout
) -> tuple[StepShard, dict[str, float]]:
    """Estimate from r_t = -beta * KL_t, plus shaped reward at the response's last counted token.

    Then comes the estimator, whitened over all counted tokens of the rollout step.
    """
    penalised = uses_kl_in_reward(config)
    coefficient = controller.value if penalised else 0.0
    estimates: list[tuple[Tensor, Tensor]] = []
    # three moments; means of KL, their number; samples
    sums = torch.zeros(6, dtype=torch.float64, device=device())
    if layout.is_last_stage:
        for batch in _batches(shard):
            kl = _kl(batch, config.algorithm.kl_penalty) if penalised else torch.zeros_like(batch.loss_mask).double()
            estimates.append(_estimate(batch, kl, coefficient, shard, config))
            if layout.counts_tokens:
                counted = batch.loss_mask != 0
                sums[:3] += moments(estimates[-1][0], counted)
                sums[3:5] += _sum_of_means(kl, counted, batch)
                sums[5] += len(batch.sample_ids)
    dist.all_reduce(sums)
    mean, variance = mean_and_variance(sums[:3])
    metrics = {"actor/advantage_mean": float(mean), "actor/advantage_std": float(variance.sqrt())}
    if penalised:
        sum_of_means, num_means, num_samples = sums[3:].tolist()
        metrics |= _move(controller, sum_of_means / max(num_means, 1.0), int(num_samples))
    return (_with_estimates(shard, estimates, sums[:3]) if estimates else shard), metrics


def _sum_of_means(kl: Tensor, counted: Tensor, batch: MicroBatch) -> Tensor:
    """Return [2]: the sum over the samples of the mean KL of their counted tokens, and how many
    samples have such tokens."""
    segments = batch.segment_ids.reshape(-1)
    per_segment = kl.new_zeros(2, batch.num_segments)
    per_segment.index_add_(1, segments, torch.stack([kl.reshape(-1), counted.reshape(-1).to(kl.dtype)]))
    total, num_tokens = per_segment
    return torch.stack([(total / num_tokens.clamp(min=1.0)).sum(), (num_tokens > 0).sum()])


def _estimate(
    batch: MicroBatch, kl: Tensor, coefficient: float, shard: StepShard, config: Config
) -> tuple[Tensor, Tensor]:
    """Return advantages before whitening, and returns: float64, of the shape of the batch's
    tokens."""
    algorithm = config.algorithm
    counted = batch.loss_mask != 0
    is_end = last_counted(counted, batch.segment_ids, batch.num_segments)
    reward_of_segment = kl.new_zeros(batch.num_segments)
    earned = [shard.rewards[i].reward for i in batch.sample_ids]
    reward_of_segment[: len(earned)] = kl.new_tensor(earned)  # padding is the last segment
    rewards = torch.where(is_end, reward_of_segment[batch.segment_ids], 0) - coefficient * kl
    values = None if batch.values is None else batch.values.double()
    tokens = TokenRewards(rewards, counted, is_end, values, algorithm.gamma, algorithm.lam)
    return pkgutil.resolve_name(advantage_estimator(config).function)(tokens)


def _with_estimates(shard: StepShard, estimates: list[tuple[Tensor, Tensor]], total: Tensor) -> StepShard:
    """Put the estimates of all micro-batches, in order, in their places, whitened."""
    remaining = iter(estimates)

    def filled(batch: MicroBatch) -> MicroBatch:
        advantages, returns = next(remaining)
        keep = advantages.new_zeros(batch.num_segments, dtype=torch.bool)
        keep[: len(batch.sample_ids)] = torch.tensor([shard.rewards[i].keep for i in batch.sample_ids])
        # after whitening: masked groups belong to its moments
        acts = (batch.loss_mask != 0) & keep[batch.segment_ids]
        whitened = torch.where(acts, whiten(advantages, total), 0)
        return replace(batch, advantages=whitened.float(), returns=returns.float())

    return shard.with_mini_batches([[filled(batch) for batch in mini] for mini in shard.mini_batches])


def _per_group(
    shard: StepShard, controller: FixedKLController, config: Config, layout: ParallelLayout
) -> tuple[StepShard, dict[str, float]]:
    """Estimate from R_i - beta * sum_t KL_t, then the estimator over the group again.

    A sample's KL is summed over the counted tokens of all its rows, since GRPO sums token rewards
    before it compares a group. The controller sees the mean over the new samples of their mean KL
    per token.
    """
    # row -> (sum over its tokens; number of tokens, 0 of a replayed sample: its KL was an older
    # policy's)
    kl_of_row: dict[int, tuple[float, float]] = {}
    if layout.is_last_stage and layout.counts_tokens:
        for batch in _batches(shard):
            kl_of_row.update(_kl_by_row(batch, config.algorithm.kl_penalty))
    kl_of_row = {row: kl for part in layout.gather(kl_of_row) for row, kl in part.items()}
    kl_of_sample: dict[int, tuple[float, float]] = {}
    for first, earned in shard.rewards.items():
        of_rows = [kl_of_row[first + place] for place in range(len(earned.factors))]
        kl_of_sample[first] = sum(kl for kl, _ in of_rows), sum(tokens for _, tokens in of_rows)
    penalised = {
        sample: earned._replace(reward=earned.reward - controller.value * kl_of_sample[sample][0])
        for sample, earned in shard.rewards.items()
    }
    algorithm = config.algorithm
    advantages = group_estimates(penalised, algorithm.adv_estimator, algorithm.norm_adv_by_std_in_grpo)
    means = [kl / tokens for kl, tokens in kl_of_sample.values() if tokens]
    metrics = _move(controller, sum(means) / max(len(means), 1), len(kl_of_sample))
    moved = [[_with_advantages(batch, advantages) for batch in mini_batch] for mini_batch in shard.mini_batches]
    return shard.with_mini_batches(moved), metrics


def _move(controller: FixedKLController, mean_kl: float, num_samples: int) -> dict[str, float]:
    """Return the metrics of the step's penalty, and move the controller to the next step's
    coefficient."""
    metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": controller.value}
    controller.update(mean_kl, num_samples)
    return metrics


def _kl(batch: MicroBatch, kind: str) -> Tensor:
    """Return the KL per token, float64, 0 for uncounted tokens."""
    if kind == FULL_KL:
        assert batch.full_kl is not None, "the policy has measured this KL"
        kl = batch.full_kl.double()
    else:
        assert batch.old_log_probs is not None and batch.ref_log_probs is not None, "both models have scored the batch"
        kl = kl_penalty(kind, batch.old_log_probs.double(), batch.ref_log_probs.double())
    return torch.where(batch.loss_mask != 0, kl, 0.0)


def _kl_by_row(batch: MicroBatch, kind: str) -> dict[int, tuple[float, float]]:
    tokens = batch.by_sample(((batch.loss_mask != 0) & (batch.exp_mask == 0)).double())
    kl = batch.by_sample(_kl(batch, kind))
    return {i: (float(values.sum()), float(tokens[i].sum())) for i, values in kl.items()}


def _with_advantages(batch: MicroBatch, advantages: dict[int, Advantage]) -> MicroBatch:
    per_sample: dict[int, Tensor] = {
        i: torch.full((length,), float(advantages[i]), device=batch.tokens.device)
        for i, length in zip(batch.sample_ids, batch.lengths, strict=True)
    }
    return replace(batch, advantages=batch.from_samples(per_sample))


def _batches(shard: StepShard) -> Iterator[MicroBatch]:
    return (batch for mini_batch in shard.mini_batches for batch in mini_batch)
