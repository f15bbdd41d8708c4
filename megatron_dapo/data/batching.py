"""From finished groups to training samples, mini-batches and data-parallel shards.

Pure and deterministic.
"""

import math
import pkgutil
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from megatron_dapo.algorithms.estimators import GroupRewards
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.sizes import ceil_div
from megatron_dapo.config.built_ins import estimator_of
from megatron_dapo.data.own_estimator import Advantage, by_branch, load_own_estimator, own_estimates
from megatron_dapo.data.samples import Branch, Group, Sample
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

    sample_id: int  # place among the rollout step's rows: the key of its results
    uid: str  # the group's
    tokens: np.ndarray  # int32
    loss_mask: np.ndarray  # uint8, 0 or 1
    rollout_log_probs: np.ndarray  # float32, by the server; 0 outside the response
    # the same for every token of the response, or [L], by an estimator of the user's own
    advantage: Advantage
    # int32, of the weights behind token t + 1; [1] for one version throughout
    weight_versions: np.ndarray
    exp_mask: bool = False  # replayed: rollout_log_probs are of the policy that wrote it
    # of all tokens but the last, at their own places (data/routed_experts.py); empty if unknown
    routed_experts: np.ndarray = field(default_factory=partial(nothing, EXPERT))
    num_elsewhere: int = 0  # counted tokens in its trajectory's other rows
    stands: bool = True  # for it in counts: the first of its rows with counted tokens

    @property
    def length(self) -> int:
        """Return the number of tokens, prompt included."""
        return len(self.tokens)


class SampleReward(NamedTuple):
    """A trajectory's part in the estimate over its group."""

    uid: str  # the group's
    reward: float  # after shaping
    correct: bool
    num_tokens: int  # of the response in its longest branch, with an environment's
    num_counted: int  # the model's own, of all branches
    baseline: float | None = None  # shaped reward of one greedy answer to the group's prompt
    keep: bool = True  # False: the group's advantages are 0 under every estimator
    factors: tuple[float, ...] = (1.0,)  # of the advantage, by row
    branches: tuple[Branch, ...] = ()  # for an estimator of the user's own
    extra_info: Mapping | None = None  # for the same: the prompt's


Credit = Callable[[Sample], Sequence[float]]
"""A trajectory -> factors of its branches' advantages (agents/credit.py)."""


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
    credit: Credit | None = None,
) -> list[TrainSample]:
    """Return the rows of all groups, in order, with advantages by `estimator` on shaped rewards.

    A sample has a row per branch; its sample_id is the first one's. Advantages are estimated group
    by group, over samples, never rows, and multiplied by `credit` (None: 1). An estimator per token leaves
    advantages of 0 here: it needs log-probs or values.

    filter_truncated (overlong filtering): the tokens of truncated responses get no loss. Their
    rewards still belong to the group's mean and deviation.

    Raises UserError for an infinite or NaN reward, for a negative one by whose mean the estimator
    would divide, for a missing reward of a greedy answer, and for several branches with an
    estimator per token.
    """
    row = estimator_of(estimator)
    rewards = sample_rewards(groups, credit, with_tokens=row.is_own)
    for earned in rewards.values():
        _check_reward(earned, estimator)
    advantages = {} if row.per_token else group_estimates(rewards, estimator, normalize_by_std)
    rows: list[TrainSample] = []
    for sample in (sample for group in groups for sample in group.samples):
        is_left_out = filter_truncated and sample.is_truncated
        counts = [0 if is_left_out else int(branch.loss_mask.sum()) for branch in sample.branches]
        for place, branch in enumerate(sample.branches):
            rows.append(_train_sample(len(rows), sample, branch, advantages.get(len(rows), 0.0), counts, place))
    return rows


def sample_rewards(
    groups: Iterable[Group], credit: Credit | None = None, with_tokens: bool = False
) -> dict[int, SampleReward]:
    """Return the rewards of all samples by sample_id, that of the first row, in order."""
    members = [(group, sample) for group in groups for sample in group.samples]
    firsts = accumulate((len(sample.branches) for _, sample in members), initial=0)
    rewards = (
        SampleReward(
            uid=sample.uid,
            reward=sample.reward,
            correct=sample.correct,
            num_tokens=sample.num_response_tokens,
            num_counted=sample.num_written_tokens,
            baseline=group.baseline_reward,
            keep=group.keep,
            factors=tuple(credit(sample)) if credit else (1.0,) * len(sample.branches),
            branches=sample.branches if with_tokens else (),
            extra_info=group.prompt.extra_info if with_tokens else None,
        )
        for group, sample in members
    )
    return dict(zip(firsts, rewards, strict=False))


def group_estimates(
    rewards: Mapping[int, SampleReward], estimator: str, normalize_by_std: bool
) -> dict[int, Advantage]:
    """Return sample_id -> advantage of every row by an estimator of groups; 0 in groups that are
    not kept. It is an array of the row's response only by one of the user's own, per token.

    The samples of a group have one uid; a sample counts once, however many rows it has.
    """
    row = estimator_of(estimator)
    members: dict[str, list[int]] = {}
    for sample_id, earned in rewards.items():
        members.setdefault(earned.uid, []).append(sample_id)
    advantages: dict[int, Advantage] = {}
    for uid, ids in members.items():
        of_group = _group_rewards([rewards[i] for i in ids], normalize_by_std)
        estimates: Sequence[Advantage]
        if row.is_own:
            estimates = own_estimates(load_own_estimator(estimator), of_group, uid)
        else:
            estimates = pkgutil.resolve_name(row.function)(of_group).tolist()
        for first, estimate in zip(ids, estimates, strict=True):
            earned = rewards[first]
            parts = by_branch(estimate, earned.branches)
            for place, (factor, part) in enumerate(zip(earned.factors, parts, strict=False)):
                advantages[first + place] = factor * part * earned.keep
    return advantages


def _group_rewards(members: Sequence[SampleReward], normalize_by_std: bool) -> GroupRewards:
    rows = [(each.reward, each.correct, each.num_tokens, each.num_counted) for each in members]
    columns = torch.tensor(list(zip(*rows, strict=True)), dtype=torch.float64)
    rewards, correct, num_tokens, num_counted = columns
    first = members[0]
    return GroupRewards(
        *(rewards, correct, num_tokens, num_counted, first.baseline, normalize_by_std),
        log_probs=tuple(_of_tokens(each, "rollout_log_probs") for each in members if each.branches),
        masks=tuple(_of_tokens(each, "loss_mask") for each in members if each.branches),
        extra_info=dict(first.extra_info or {}),
    )


def _of_tokens(earned: SampleReward, name: str) -> torch.Tensor:
    """Return an array of all branches, one after the other, [T] float32."""
    return torch.tensor(np.concatenate([getattr(branch, name) for branch in earned.branches]), dtype=torch.float32)


def _check_reward(earned: SampleReward, estimator: str) -> None:
    row = estimator_of(estimator)
    if row.needs_baseline and earned.baseline is None:
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
    if row.divides_by_mean and earned.reward < 0:
        raise UserError(
            f"A response of group {earned.uid} has the reward {earned.reward:g}, but algorithm.adv_estimator is "
            f"{estimator}, which divides by the mean of rewards; let reward.function give wrong answers 0, "
            f"or choose another estimator."
        )
    if row.per_token and len(earned.factors) > 1:
        raise UserError(
            f"A response of group {earned.uid} has {len(earned.factors)} branches, but algorithm.adv_estimator is "
            f"{estimator}, which estimates each token of one sequence; choose an estimator per response, such as grpo."
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


def _train_sample(
    index: int, sample: Sample, branch: Branch, advantage: Advantage, counts: Sequence[int], place: int
) -> TrainSample:
    """Return the row of a branch. counts: tokens with a loss of all branches; place: this one's."""
    assert len(branch.prompt_tokens), f"sample {sample.uid}: without a prompt nothing predicts the first token"
    num_prompt = len(branch.prompt_tokens)
    num_response = len(branch.response_tokens)
    versions = branch.weight_versions
    lengths = {len(branch.loss_mask), len(branch.rollout_log_probs), len(branch.weight_versions)}
    assert lengths == {num_response}, f"sample {sample.uid}: lengths differ"

    def aligned(response_values: np.ndarray, dtype: Dtype) -> np.ndarray:
        row = np.empty(num_prompt + num_response, dtype=dtype)
        row[: num_prompt - 1] = 0
        row[num_prompt - 1 : -1] = response_values
        row[-1] = 0
        return row

    return TrainSample(
        sample_id=index,
        uid=sample.uid,
        tokens=joined(TOKEN, branch.prompt_tokens, branch.response_tokens),
        loss_mask=aligned(branch.loss_mask if counts[place] else np.zeros_like(branch.loss_mask), MASK),
        rollout_log_probs=aligned(branch.rollout_log_probs, LOG_PROB),
        advantage=aligned(advantage, LOG_PROB) if isinstance(advantage, np.ndarray) else advantage,
        # a third of the bytes sent to the ranks, and nearly always one number
        weight_versions=versions[:1] if has_one_value(versions) else aligned(versions, VERSION),
        exp_mask=sample.exp_mask,
        routed_experts=branch.routed_experts,
        num_elsewhere=sum(counts) - counts[place],
        stands=not any(counts[:place]),
    )
