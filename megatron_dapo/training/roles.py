"""The optional models beside the policy, and their null objects: to the loop both are alike."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from megatron_dapo.config.derived import needs_reference, uses_critic
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.lora_settings import actor_is_reference
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.critic import Critic
from megatron_dapo.training.distribute import StepShard
from megatron_dapo.training.policy import Policy, WeightLoader
from megatron_dapo.training.reference import ActorAsReference, Reference

Phase = Callable[[str], AbstractContextManager[None]]
"""Counts the seconds inside as the phase's."""


class _TimedReference:
    """The reference of a run with a KL term."""

    def __init__(self, reference: Reference | ActorAsReference, phase: Phase) -> None:
        self.model = reference
        self._phase = phase

    def score(self, shard: StepShard) -> StepShard:
        """Return the shard with the reference's log-probs. Collective over all ranks."""
        with self._phase("ref_log_probs"):
            return shard.with_mini_batches(self.model.score(shard.mini_batches))


class NoReference:
    """The reference of a run without a KL term."""

    model = None

    def score(self, shard: StepShard) -> StepShard:
        return shard


class _TimedCritic:
    """The critic of a PPO run."""

    def __init__(self, critic: Critic, phase: Phase) -> None:
        self._phase = phase
        self.model = critic

    def score(self, shard: StepShard) -> StepShard:
        """Return the shard with values. Collective over all ranks."""
        with self._phase("values"):
            return self.model.score(shard)

    def update(self, shard: StepShard) -> dict[str, float]:
        """Take the critic's optimizer steps towards the shard's returns; return its metrics.
        Collective."""
        with self._phase("update_critic"):
            return self.model.update(shard)


class NoCritic:
    """The absent critic of a run without values in its advantages."""

    model = None

    def score(self, shard: StepShard) -> StepShard:
        return shard

    def update(self, shard: StepShard) -> dict[str, float]:
        return {}


def make_reference(
    config: Config, layout: ParallelLayout, policy: Policy, load: WeightLoader, phase: Phase
) -> _TimedReference | NoReference:
    """Build the reference if the config needs one. Collective over all ranks."""
    if not needs_reference(config):
        return NoReference()
    if actor_is_reference(config):
        return _TimedReference(ActorAsReference(config, policy), phase)
    return _TimedReference(Reference(config, layout, load), phase)


def make_critic(config: Config, layout: ParallelLayout, load: WeightLoader, phase: Phase) -> _TimedCritic | NoCritic:
    """Build the critic if the config needs one. Collective over all ranks."""
    return _TimedCritic(Critic(config, layout, load), phase) if uses_critic(config) else NoCritic()
