"""The rules for a group's signal, by the config's names; and the queue with them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_dapo.common.own_function import OwnFunction
from megatron_dapo.config.derived import gen_batch_size, replaces_groups, uses_dynamic_sampling
from megatron_dapo.config.key_names import SAMPLING
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Sample
from megatron_dapo.queue.group_queue import FilterReason, GroupQueue, QueueLimits


def _all_correct(correct: Sequence[bool]) -> str | None:
    return "all_correct" if all(correct) else None


def _all_incorrect(correct: Sequence[bool]) -> str | None:
    return None if any(correct) else "all_incorrect"


# Modes by the raw correctness of a group's responses -> the reason to drop it, or None to keep it.
# Not by the shaped reward: there an all-wrong group of different lengths would pass.
FILTER_MODES: dict[str, Callable[[Sequence[bool]], str | None]] = {
    "strict": lambda correct: _all_correct(correct) or _all_incorrect(correct),
    "remove_all_correct": _all_correct,
    "remove_all_incorrect": _all_incorrect,
    "none": lambda correct: None,
}

# The other modes, metrics under verl's names -> the field of a sample that must differ in a group.
# The final reward is the result of the reward function and shaping, as in DAPO's pipeline. Groups
# are chosen by it, and only then scored by the reference, for the KL in the advantages. verl
# subtracts the KL first. Once the policy has moved, two responses then have equal rewards only if
# they are the same token for token, so nothing is filtered.
FILTER_METRICS: dict[str, str] = {
    "acc": "correct",  # by the verifier
    "score": "raw_reward",  # of the verifier, before shaping
    "seq_reward": "reward",  # after shaping: the sum of the response's token rewards
    "seq_final_reward": "reward",
}


def has_spread(values: Sequence[float]) -> bool:
    """Return whether a group's metric has a standard deviation above 0.

    A group of one always passes, as in verl. Values are compared, since the computed deviation of
    equal numbers can differ from 0 by rounding.
    """
    return len(values) == 1 or any(value != values[0] for value in values)


def by_correctness(mode: str) -> FilterReason:
    """Return the rule of a mode of FILTER_MODES; its reason is all_correct or all_incorrect."""
    return lambda samples: FILTER_MODES[mode]([sample.correct for sample in samples])


def by_spread(metric: str) -> FilterReason:
    """Return the rule of a metric of FILTER_METRICS.

    Its reason is uniform: the metric's deviation is 0.
    """
    name = FILTER_METRICS[metric]
    return lambda samples: None if has_spread([getattr(sample, name) for sample in samples]) else "uniform"


def by_own(path: str) -> FilterReason:
    """Return the rule of a function of the user's own, imported here; its reason is own.

    UserError is raised here, or by the rule, for anything but true or false.
    """
    function = OwnFunction.load(f"{SAMPLING}.filter_mode", path)

    def reason(samples: Sequence[Sample]) -> str | None:
        has_signal = function(_yes_or_no, "true or false", f"group {samples[0].uid}", samples)
        return None if has_signal else "own"

    return reason


def _yes_or_no(answer: Any) -> bool:
    if answer not in (True, False):  # numpy's too
        raise ValueError(answer)
    return bool(answer)


def _rule(mode: str) -> FilterReason:
    make = by_spread if mode in FILTER_METRICS else by_correctness if mode in FILTER_MODES else by_own
    return make(mode)


def make_queue(config: Config) -> GroupQueue:
    """Return the queue of the config.

    Without dynamic sampling it takes one gen batch and drops nothing.
    """
    sampling = config.algorithm.dynamic_sampling
    size = config.data.train_batch_size
    limits = QueueLimits(
        size,
        size,
        max_staleness=config.actor_rollout_ref.rollout.max_staleness,
        total_steps=config.trainer.total_training_steps,
    )
    if not uses_dynamic_sampling(config):
        return GroupQueue(limits, by_correctness("none"))
    rule = _rule(sampling.filter_mode)
    if not replaces_groups(config):
        return GroupQueue(replace(limits, masks=True), rule)
    limits = replace(
        limits,
        gen_batch_size=gen_batch_size(config),
        max_num_gen_batches=sampling.max_num_gen_batches,
        on_exhausted=sampling.on_exhausted,
    )
    return GroupQueue(limits, rule)


def filter_in_words(config: Config) -> str:
    """Return the rule in the words of the log: "strict mode"."""
    return f"{config.algorithm.dynamic_sampling.filter_mode} mode"
