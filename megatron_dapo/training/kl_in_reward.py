"""The KL penalty inside the reward: R_i - beta * sum_t KL_t, then the group advantages again."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.algorithms import FixedKLController, group_advantages, kl_penalty
from megatron_dapo.config import AlgorithmConfig
from megatron_dapo.data import MicroBatch
from megatron_dapo.platform import ParallelLayout
from megatron_dapo.training.distribute import StepShard


def apply_kl_in_reward(
    shard: StepShard, controller: FixedKLController, algorithm: AlgorithmConfig, layout: ParallelLayout
) -> tuple[StepShard, dict[str, float]]:
    """The shard with advantages of the penalised rewards, and metrics; moves the controller. Collective over all ranks.

    Needs old and reference log-probs on the last stage. The KL of a sample is summed over its counted tokens (GRPO sums
    token rewards before it compares a group), the controller sees the mean over all tokens.
    """
    kl_of_sample: dict[int, tuple[float, float]] = {}  # sample -> (sum over its tokens, number of tokens)
    if layout.is_last_stage and layout.tp_rank == 0:
        for batch in (batch for mini_batch in shard.mini_batches for batch in mini_batch):
            kl_of_sample.update(_kl_by_sample(batch, algorithm.kl_penalty))
    gathered: list = [None] * layout.world_size
    dist.all_gather_object(gathered, kl_of_sample, group=layout.cpu_group)
    kl_of_sample = {sample: kl for part in gathered for sample, kl in part.items()}
    advantages = _advantages(shard.rewards, kl_of_sample, controller.value, algorithm.norm_adv_by_std_in_grpo)
    num_tokens = sum(tokens for _, tokens in kl_of_sample.values())
    mean_kl = sum(kl for kl, _ in kl_of_sample.values()) / max(num_tokens, 1.0)
    metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": controller.value}
    controller.update(mean_kl, len(kl_of_sample))
    moved = [[_with_advantages(batch, advantages) for batch in mini_batch] for mini_batch in shard.mini_batches]
    return shard.with_mini_batches(moved), metrics


def _kl_by_sample(batch: MicroBatch, kind: str) -> dict[int, tuple[float, float]]:
    counted = batch.loss_mask != 0
    kl = torch.where(counted, kl_penalty(kind, batch.old_log_probs, batch.ref_log_probs), 0.0)
    tokens = batch.by_sample(counted.double())
    return {i: (float(values.sum()), float(tokens[i].sum())) for i, values in batch.by_sample(kl.double()).items()}


def _advantages(
    rewards: dict[int, tuple[str, float]], kl: dict[int, tuple[float, float]], coefficient: float, by_std: bool
) -> dict[int, float]:
    groups: dict[str, list[int]] = {}
    for sample, (uid, _) in rewards.items():
        groups.setdefault(uid, []).append(sample)
    advantages: dict[int, float] = {}
    for members in groups.values():
        penalised = [rewards[i][1] - coefficient * kl[i][0] for i in members]
        values = group_advantages(torch.tensor(penalised, dtype=torch.float64), by_std)
        advantages.update(zip(members, values.tolist(), strict=True))
    return advantages


def _with_advantages(batch: MicroBatch, advantages: dict[int, float]) -> MicroBatch:
    per_sample: dict[int, Tensor] = {
        i: torch.full((length,), advantages[i], device=batch.tokens.device)
        for i, length in zip(batch.sample_ids, batch.lengths, strict=True)
    }
    return replace(batch, advantages=batch.from_samples(per_sample))
