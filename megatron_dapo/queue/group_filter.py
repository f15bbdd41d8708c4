"""The rules that tell whether a group carries signal, by the config's names; and the queue with them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_dapo.config.derived import gen_batch_size, uses_dynamic_sampling
from megatron_dapo.config.schema.config import Config
from megatron_dapo.queue.group_queue import FilterReason, GroupQueue, QueueLimits


def _all_correct(correct: Sequence[bool]) -> str | None:
    return "all_correct" if all(correct) else None


def _all_incorrect(correct: Sequence[bool]) -> str | None:
    return None if any(correct) else "all_incorrect"


# filter_mode -> function of the raw correctness of a group's responses: the reason to drop it, or None to keep it.
# Raw correctness, not the shaped reward: there an all-wrong group of different lengths would pass.
FILTER_MODES: dict[str, Callable[[Sequence[bool]], str | None]] = {
    "strict": lambda correct: _all_correct(correct) or _all_incorrect(correct),
    "remove_all_correct": _all_correct,
    "remove_all_incorrect": _all_incorrect,
    "none": lambda correct: None,
}

# filter_groups.metric -> the field of a sample that a group must differ in. The names are verl's. The final reward is
# what the reward function and shaping give, as in DAPO's pipeline: groups are chosen by it, and only then scored by the
# reference, whose KL enters the advantages. verl subtracts the KL first: once the policy has moved, two responses have
# equal rewards only if they are the same token for token, so that nothing is filtered.
FILTER_METRICS: dict[str, str] = {
    "acc": "correct",  # by the verifier
    "score": "raw_reward",  # of the verifier, before shaping
    "seq_reward": "reward",  # after shaping: the sum of the response's token rewards
    "seq_final_reward": "reward",
}


def has_spread(values: Sequence[float]) -> bool:
    """Return whether a group's metric has a standard deviation above 0.

    A group of one always passes, as in verl. Values are compared, since the computed deviation of equal
    numbers can differ from 0 by rounding.
    """
    return len(values) == 1 or any(value != values[0] for value in values)


def by_correctness(mode: str) -> FilterReason:
    """Return the rule of a `dapo.dynamic_sampling.filter_mode`; its reason is all_correct or all_incorrect."""
    return lambda samples: FILTER_MODES[mode]([sample.correct for sample in samples])


def by_spread(metric: str) -> FilterReason:
    """Return the rule of a `filter_groups.metric`; its reason is uniform: the metric's deviation is 0."""
    name = FILTER_METRICS[metric]
    return lambda samples: None if has_spread([getattr(sample, name) for sample in samples]) else "uniform"


def make_queue(config: Config) -> GroupQueue:
    """Return the queue of the config; without dynamic sampling one gen batch, of which nothing is dropped."""
    dynamic = config.algorithm.dapo.dynamic_sampling
    groups = config.algorithm.filter_groups
    size = config.data.train_batch_size
    limits = QueueLimits(
        size,
        size,
        max_staleness=config.actor_rollout_ref.rollout.max_staleness,
        total_steps=config.trainer.total_training_steps,
    )
    if not uses_dynamic_sampling(config):
        return GroupQueue(limits, by_correctness("none"))
    if not groups.enable and dynamic.form == "mask":
        return GroupQueue(replace(limits, masks=True), by_correctness(dynamic.filter_mode))
    keys = groups if groups.enable else dynamic
    limits = replace(
        limits,
        gen_batch_size=gen_batch_size(config),
        max_num_gen_batches=keys.max_num_gen_batches,
        on_exhausted=keys.on_exhausted,
    )
    if groups.enable:
        return GroupQueue(replace(limits, section="algorithm.filter_groups"), by_spread(groups.metric))
    return GroupQueue(limits, by_correctness(dynamic.filter_mode))


def filter_in_words(config: Config) -> str:
    """Return the rule in the words of the log: "strict mode"."""
    groups = config.algorithm.filter_groups
    dynamic = config.algorithm.dapo.dynamic_sampling
    return f"filter_groups metric {groups.metric}" if groups.enable else f"{dynamic.filter_mode} mode"
