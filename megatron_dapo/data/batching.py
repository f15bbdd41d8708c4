"""From finished groups to training samples, mini-batches and data-parallel shards.

Pure and deterministic.
"""

import math
import pkgutil
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from megatron_dapo.algorithms.estimators import GroupRewards
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.sizes import ceil_div
from megatron_dapo.config.built_ins import ESTIMATORS
from megatron_dapo.data.samples import Group, Sample
from megatron_dapo.data.token_arrays import (
    EXPERT,
    LOG_PROB,
    MASK,
    TOKEN,
    VERSION,
    Dtype,
    has_one_value,
    joined,
    nothing,
)


@dataclass(frozen=True, eq=False)
class TrainSample:
    """One training sequence, prompt and response, of L tokens.

    Arrays are [L] but for routed_experts. All arrays but `tokens` and routed_experts are aligned to
    the predicting position: entry t belongs to token t + 1. The entry of the last token is always
    0. `loss_mask[t] == 1`: the model wrote token t + 1, and it counts.
    """

    sample_id: int  # place in the rollout step: the key of its results
    uid: str  # the group's
    tokens: np.ndarray  # int32
    loss_mask: np.ndarray  # uint8, 0 or 1
    rollout_log_probs: np.ndarray  # float32, by the server; 0 outside the response
    advantage: float  # the same for every token of the response
    # int32, of the weights behind token t + 1; [1] for one version throughout
    weight_versions: np.ndarray
    exp_mask: bool = False  # replayed: rollout_log_probs are of the policy that wrote it
    # of all tokens but the last, at their own places (data/routed_experts.py); empty if unknown
    routed_experts: np.ndarray = field(default_factory=partial(nothing, EXPERT))

    @property
    def length(self) -> int:
        """Return the number of tokens, prompt included."""
        return len(self.tokens)


class SampleReward(NamedTuple):
    """A sample's part in the estimate over its group."""

    uid: str  # the group's
    reward: float  # after shaping
    correct: bool
    num_tokens: int  # of the response, with an environment's
    num_counted: int  # of them, the model's own
    baseline: float | None = None  # shaped reward of one greedy answer to the group's prompt
    keep: bool = True  # False: the group's advantages are 0 under every estimator


@dataclass(frozen=True)
class CostModel:
    """The work of one sequence of length L, in any unit.

    linear * L + quadratic * L^2 (attention).
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __call__(self, length: int) -> float:
        return self.linear * length + self.quadratic * length * length

    @classmethod
    def of_decoder(
        cls, *, hidden_size: int, ffn_size: int, attention_weights: int, attention_width: float
    ) -> "CostModel":
        """Return the multiply-adds of one layer (gated MLP, causal attention); linear = 1.

        Per L: the weights. Per L^2: half of two products of attention_width (heads x dim).
        """
        return cls(1.0, attention_width / (attention_weights + 3 * hidden_size * ffn_size))


def assemble(
    groups: Sequence[Group],
    *,
    estimator: str = "grpo",
    normalize_by_std: bool = True,
    filter_truncated: bool = False,
) -> list[TrainSample]:
    """Return the samples of all groups, in order, with advantages by `estimator` on shaped rewards.

    Advantages are estimated group by group. An estimator per token leaves advantages of 0 here: it
    needs log-probs or values.

    filter_truncated (overlong filtering): the tokens of truncated responses get no loss. Their
    rewards still belong to the group's mean and deviation.

    Raises UserError for an infinite or NaN reward, for a negative one by whose mean the estimator
    would divide, and for a missing reward of a greedy answer.
    """
    rewards = sample_rewards(groups)
    for earned in rewards.values():
        _check_reward(earned, estimator)
    advantages = dict.fromkeys(rewards, 0.0)
    if not ESTIMATORS[estimator].per_token:
        advantages = group_estimates(rewards, estimator, normalize_by_std)
    samples = (sample for group in groups for sample in group.samples)
    return [_train_sample(index, each, advantages[index], filter_truncated) for index, each in enumerate(samples)]


def sample_rewards(groups: Iterable[Group]) -> dict[int, SampleReward]:
    """Return sample_id -> reward of all samples, in the order of `assemble`."""
    rewards = (
        SampleReward(
            uid=sample.uid,
            reward=sample.reward,
            correct=sample.correct,
            num_tokens=len(sample.response_tokens),
            num_counted=int(np.count_nonzero(sample.loss_mask)),
            baseline=group.baseline_reward,
            keep=group.keep,
        )
        for group in groups
        for sample in group.samples
    )
    return dict(enumerate(rewards))


def group_estimates(rewards: Mapping[int, SampleReward], estimator: str, normalize_by_std: bool) -> dict[int, float]:
    """Return sample_id -> advantage by an estimator per response; 0 in groups that are not kept.

    The samples of a group have one uid.
    """
    estimate = pkgutil.resolve_name(ESTIMATORS[estimator].function)
    members: dict[str, list[int]] = {}
    for sample_id, earned in rewards.items():
        members.setdefault(earned.uid, []).append(sample_id)
    advantages: dict[int, float] = {}
    for ids in members.values():
        of_group = _group_rewards([rewards[i] for i in ids], normalize_by_std)
        estimates = estimate(of_group) * float(rewards[ids[0]].keep)
        advantages.update(zip(ids, estimates.tolist(), strict=True))
    return advantages


def _group_rewards(members: Sequence[SampleReward], normalize_by_std: bool) -> GroupRewards:
    rows = [(each.reward, each.correct, each.num_tokens, each.num_counted) for each in members]
    columns = torch.tensor(list(zip(*rows, strict=True)), dtype=torch.float64)
    rewards, correct, num_tokens, num_counted = columns
    return GroupRewards(rewards, correct, num_tokens, num_counted, members[0].baseline, normalize_by_std)


def _check_reward(earned: SampleReward, estimator: str) -> None:
    if ESTIMATORS[estimator].needs_baseline and earned.baseline is None:
        raise UserError(
            f"Group {earned.uid} has no reward of a greedy answer, which algorithm.adv_estimator={estimator} compares "
            f"with; sample it again with {estimator}, or choose another estimator for this batch."
        )
    for reward in (earned.reward, earned.baseline):
        if reward is not None and not math.isfinite(reward):
            raise UserError(
                f"A response of group {earned.uid} has the reward {reward}: no advantage can be computed from it; "
                f"correct the function that reward.function names, so that it returns finite numbers only."
            )
    if ESTIMATORS[estimator].divides_by_mean and earned.reward < 0:
        raise UserError(
            f"A response of group {earned.uid} has the reward {earned.reward:g}, but algorithm.adv_estimator is "
            f"{estimator}, which divides by the mean of rewards; let reward.function give wrong answers 0, "
            f"or choose another estimator."
        )


def mini_batches(
    samples: Sequence[TrainSample], num_groups: int, seed: int | str | None = None
) -> list[list[TrainSample]]:
    """Return lists of at most num_groups whole groups, in drawn order or shuffled by `seed`.

    If the groups do not divide evenly (a partial rollout step), the mini-batches differ by one
    group at most. Each is one optimizer step of full length: a lone left-over group would weigh as
    much as the others.

    Membership is decided here, before any balancing: it cannot depend on the parallel layout.
    """
    groups = list(_by_group(samples).values())
    if seed is not None:
        random.Random(seed).shuffle(groups)
    num_parts = ceil_div(len(groups), num_groups)
    ends = [len(groups) * part // num_parts for part in range(num_parts + 1)] if num_parts else [0]
    parts = [groups[start:end] for start, end in pairwise(ends)]
    return [[sample for group in part for sample in group] for part in parts]


def shard_over_data_parallel(
    samples: Sequence[TrainSample], dp_size: int, cost: CostModel | None = None
) -> list[list[TrainSample]]:
    """Return [dp_size] lists of about equal cost, not necessarily of equal number.

    Longest processing time first: the costliest sample goes to the rank with the least cost so far.
    """
    cost = cost or CostModel()
    shards: list[list[TrainSample]] = [[] for _ in range(dp_size)]
    # a heap: of equal loads the lowest rank comes first
    loads = [(0.0, rank) for rank in range(dp_size)]
    for sample in longest_first(samples):
        load, rank = loads[0]
        shards[rank].append(sample)
        heapreplace(loads, (load + cost(sample.length), rank))
    return shards


def longest_first(samples: Iterable[TrainSample]) -> list[TrainSample]:
    """Return the samples by falling length, of equal lengths by sample_id.

    The order of arrival does not matter.
    """
    return sorted(samples, key=lambda sample: (-sample.length, sample.sample_id))


def _by_group(samples: Iterable[TrainSample]) -> dict[str, list[TrainSample]]:
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.uid, []).append(sample)
    return groups


def _train_sample(index: int, sample: Sample, advantage: float, filter_truncated: bool) -> TrainSample:
    assert len(sample.prompt_tokens), f"sample {sample.uid}: without a prompt nothing predicts the first token"
    num_prompt = len(sample.prompt_tokens)
    num_response = len(sample.response_tokens)
    versions = sample.weight_versions
    lengths = {len(sample.loss_mask), len(sample.rollout_log_probs), len(sample.weight_versions)}
    assert lengths == {num_response}, f"sample {sample.uid}: lengths differ"

    def aligned(response_values: np.ndarray, dtype: Dtype) -> np.ndarray:
        row = np.empty(num_prompt + num_response, dtype=dtype)
        row[: num_prompt - 1] = 0
        row[num_prompt - 1 : -1] = response_values
        row[-1] = 0
        return row

    counts = not (filter_truncated and sample.is_truncated)
    return TrainSample(
        sample_id=index,
        uid=sample.uid,
        tokens=joined(TOKEN, sample.prompt_tokens, sample.response_tokens),
        loss_mask=aligned(sample.loss_mask if counts else np.zeros_like(sample.loss_mask), MASK),
        rollout_log_probs=aligned(sample.rollout_log_probs, LOG_PROB),
        advantage=advantage,
        # a third of the bytes sent to the ranks, and nearly always one number
        weight_versions=versions[:1] if has_one_value(versions) else aligned(versions, VERSION),
        exp_mask=sample.exp_mask,
        routed_experts=sample.routed_experts,
    )
