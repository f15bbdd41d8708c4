"""From the finished groups on rank 0 to every rank's own shard of packed micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from megatron_dapo.agents.credit import load_credit
from megatron_dapo.common.garbage import collection_paused
from megatron_dapo.config.derived import advantage_estimator, critic_batching, uses_critic, uses_kl_in_reward
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.batching import SampleReward, TrainSample, assemble, mini_batches, sample_rewards
from megatron_dapo.data.bins import Bins
from megatron_dapo.data.flat_pickle import flat_pickle, from_flat_pickle
from megatron_dapo.data.own_estimator import load_own_estimator
from megatron_dapo.data.packing import ACTOR_CAP, MicroBatch
from megatron_dapo.data.samples import Group
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.cutting import Cutter
from megatron_dapo.training.expert_cut import ExpertCut


@dataclass(frozen=True)
class StepShard:
    """This rank's part of a rollout step."""

    mini_batches: list[list[MicroBatch]]
    """One list of micro-batches per optimizer step."""
    rewards: dict[int, SampleReward]
    """Of ALL samples, by sample_id of the first row, if advantages need the models' scores (see
    `estimate_advantages`)."""
    critic_mini_batches: list[list[MicroBatch]] = field(default_factory=list)
    """The same samples in the critic's cut; [] without a critic."""
    num_shown: int = 0
    """Rows, the first ones, of the groups whose tokens are kept for people."""

    def with_mini_batches(self, mini_batches: list[list[MicroBatch]]) -> "StepShard":
        return replace(self, mini_batches=mini_batches)


class StepDistributor:
    """Distributes a step's samples. Collective over all ranks: rank 0 brings the groups, every rank
    gets its shard."""

    def __init__(
        self, config: Config, layout: ParallelLayout, spec: ModelSpec, routed_layers: tuple[int, ...] = ()
    ) -> None:
        """routed_layers: this rank's layers with replayed expert routing."""
        self._config = config
        self._experts = ExpertCut.make(config, spec, routed_layers, layout)
        self._layout = layout
        self._cutter = Cutter(config, layout, spec)
        credit = config.actor_rollout_ref.rollout.agent.credit
        self._credit = load_credit(credit) if credit else None
        if advantage_estimator(config).is_own:
            load_own_estimator(config.algorithm.adv_estimator)  # its mistakes come before the first step

    @collection_paused()
    def __call__(self, step: int, groups: Sequence[Group] | None) -> StepShard:
        """Return this rank's shard of the step. groups: the rollout step's, on rank 0; None on
        other ranks."""
        outgoing = self._layout.agreement.each(f"cutting the batch of step {step}", self._parts, step, groups)
        actors, critics, rewards, num_shown = from_flat_pickle(self._layout.hand_out(outgoing))
        mini_batches = self._collated(actors)
        if self._experts is not None:
            mini_batches = self._experts.added(actors, mini_batches)
        return StepShard(mini_batches, rewards, self._collated(critics), num_shown)

    def _parts(self, step: int, groups: Sequence[Group] | None) -> list[np.ndarray] | None:
        """Return on rank 0, which has the groups, the part of each data-parallel rank."""
        return None if groups is None else [flat_pickle(part) for part in self._cut(step, groups)]

    def _collated(self, bins_of_mini_batch: list[Bins]) -> list[list[MicroBatch]]:
        return [self._cutter.collated(bins) for bins in bins_of_mini_batch]

    def _cut(self, step: int, groups: Sequence[Group]) -> list[tuple]:
        """Return, per data-parallel rank: (samples by [mini-batch][micro-batch] of the actor, the
        same of the critic, rewards of all samples if needed, number of shown rows)."""
        config = self._config
        shaping = config.algorithm.overlong_reward_shaping
        samples = assemble(
            groups,
            estimator=config.algorithm.adv_estimator,
            normalize_by_std=config.algorithm.norm_adv_by_std_in_grpo,
            filter_truncated=shaping.enable and shaping.filter_truncated,
            credit=self._credit,
        )
        actor = config.actor_rollout_ref.actor
        if self._experts is not None:
            self._experts.check(step, samples)
        seed = f"{config.trainer.seed}:{step}" if actor.shuffle else None
        schedules = [self._cutter.schedule(mini) for mini in mini_batches(samples, actor.ppo_mini_batch_size, seed)]
        waits = uses_kl_in_reward(config) or advantage_estimator(config).per_token
        rewards = sample_rewards(groups, self._credit) if waits else {}
        shown = groups[: config.actor_rollout_ref.rollout.dump_samples]
        num_shown = sum(len(sample.branches) for group in shown for sample in group.samples)
        critics = self._critic_schedules(samples, schedules, seed) if uses_critic(config) else []
        return [
            ([plan[dp_rank] for plan in schedules], [plan[dp_rank] for plan in critics], rewards, num_shown)
            for dp_rank in range(self._layout.dp)
        ]

    def _critic_schedules(
        self, samples: Sequence[TrainSample], schedules: list[list[Bins]], seed: str | None
    ) -> list[list[Bins]]:
        """Return [mini-batch][dp]: the critic's own mini-batches and bins. A sample stays on the
        rank that has it: there its values and log-probs meet."""
        batching = critic_batching(self._config)
        own_cap = self._config.critic.max_tokens_per_microbatch
        rank_of = {
            sample.sample_id: rank
            for plan in schedules
            for rank, bins in enumerate(plan)
            for sample in chain.from_iterable(bins)
        }
        plans = []
        for mini_batch in mini_batches(samples, batching.ppo_mini_batch_size, seed):
            shards: list[list[TrainSample]] = [[] for _ in range(self._layout.dp)]
            for sample in mini_batch:
                shards[rank_of[sample.sample_id]].append(sample)
            cap_key = "critic.max_tokens_per_microbatch" if own_cap else ACTOR_CAP
            max_tokens = batching.max_tokens_per_microbatch
            plans.append(self._cutter.schedule_shards(shards, max_tokens, cap_key))
        return plans
