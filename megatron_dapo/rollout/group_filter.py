"""Which groups carry no signal, by the words of the config; and the bookkeeping that acts on it."""

from megatron_dapo.algorithms import FILTER_METRICS, FILTER_MODES, has_spread
from megatron_dapo.config import Config, gen_batch_size, uses_dynamic_sampling
from megatron_dapo.rollout.group_queue import FilterReason, GroupQueue, QueueLimits


def by_correctness(mode: str) -> FilterReason:
    """`dapo.dynamic_sampling.filter_mode`: the reason is all_correct or all_incorrect."""
    return lambda samples: FILTER_MODES[mode]([sample.correct for sample in samples])


def by_spread(metric: str) -> FilterReason:
    """`filter_groups.metric`: the reason is uniform, where the metric has a standard deviation of 0."""
    name = FILTER_METRICS[metric]
    return lambda samples: None if has_spread([getattr(sample, name) for sample in samples]) else "uniform"


def make_queue(config: Config) -> GroupQueue:
    """The bookkeeping that the config asks for: without dynamic sampling one gen batch of which nothing is dropped."""
    size, dynamic, groups = (
        config.data.train_batch_size,
        config.algorithm.dapo.dynamic_sampling,
        config.algorithm.filter_groups,
    )
    if not uses_dynamic_sampling(config):
        return GroupQueue(QueueLimits(size, size), by_correctness("none"))
    if groups.enable:
        section, reason = "algorithm.filter_groups", by_spread(groups.metric)
        limits = (gen_batch_size(config), groups.max_num_gen_batches, groups.on_exhausted)
        return GroupQueue(QueueLimits(size, *limits, section=section), reason)
    reason = by_correctness(dynamic.filter_mode)
    if dynamic.form == "mask":
        return GroupQueue(QueueLimits(size, size, masks=True), reason)
    return GroupQueue(
        QueueLimits(size, gen_batch_size(config), dynamic.max_num_gen_batches, dynamic.on_exhausted), reason
    )


def filter_in_words(config: Config) -> str:
    """How groups are judged, as the log says it: "strict mode"."""
    groups, dynamic = config.algorithm.filter_groups, config.algorithm.dapo.dynamic_sampling
    return f"filter_groups metric {groups.metric}" if groups.enable else f"{dynamic.filter_mode} mode"
