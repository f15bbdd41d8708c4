"""What the two forms of dynamic sampling demand of the other keys. As in checks.py: one sentence per mistake."""

from collections.abc import Iterator

from megatron_dapo.config.derived import gen_batch_size, uses_dynamic_sampling, uses_filter_mode
from megatron_dapo.config.keys import known_keys
from megatron_dapo.config.schema import Config

SAMPLING = "algorithm.dapo.dynamic_sampling"
GROUPS = "algorithm.filter_groups"
N = "actor_rollout_ref.rollout.n"


def gen_batches(config: Config) -> Iterator[str]:
    size, prompts, dapo = config.data.train_batch_size, gen_batch_size(config), config.algorithm.dapo
    dropping = (dapo.enable and dapo.dynamic_sampling.enable) or config.algorithm.filter_groups.enable
    if prompts > size and not dropping:
        yield (
            f"data.gen_batch_size is {prompts}, above data.train_batch_size {size}, but no group is ever dropped "
            f"with dynamic sampling off; set it to null, or enable {SAMPLING}."
        )
    section, limit = SAMPLING, dapo.dynamic_sampling.max_num_gen_batches
    if config.algorithm.filter_groups.enable:
        section, limit = GROUPS, config.algorithm.filter_groups.max_num_gen_batches
    if 0 < limit and prompts * limit < size:
        yield (
            f"data.gen_batch_size {prompts} x {section}.max_num_gen_batches {limit} prompts can never fill "
            f"data.train_batch_size {size}; raise one of the first two."
        )


def masking(config: Config) -> Iterator[str]:
    """Of form mask, a step is one gen batch, and as large as the training batch. What limits the number of gen batches
    may stay as it is for the other form."""
    if config.algorithm.dapo.dynamic_sampling.form != "mask":
        return
    if not uses_filter_mode(config):
        yield (
            f"{SAMPLING}.form is mask, but nothing is filtered that it could mask; enable algorithm.dapo and "
            f"{SAMPLING} with a filter_mode other than none, or remove form."
        )
        return
    size, prompts = config.data.train_batch_size, gen_batch_size(config)
    if prompts != size:
        yield (
            f"data.gen_batch_size is {prompts}, but with {SAMPLING}.form mask a step is one gen batch of "
            f"data.train_batch_size {size}; set gen_batch_size to null, or form to resample."
        )


def filter_groups(config: Config) -> Iterator[str]:
    groups = config.algorithm.filter_groups
    if not groups.enable:
        yield from _without_effect(config)
        return
    if config.algorithm.dapo.dynamic_sampling.enable:
        yield (
            f"{GROUPS}.enable and {SAMPLING}.enable are both true, but a group is judged once; keep the first for the "
            f"spread of a metric, or the second for right and wrong answers."
        )
    if groups.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield (
            f"{GROUPS}.metric is seq_final_reward, which has the KL penalty of algorithm.use_kl_in_reward in it, and "
            f"that is not known before the groups are chosen; set metric to seq_reward."
        )


def group_size(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.n > 1 or not uses_dynamic_sampling(config):
        return
    if config.algorithm.filter_groups.enable:
        yield (
            f"{N} is 1, but {GROUPS}.enable is true, which compares the responses of a group; "
            f"set n to 2 or more, or enable to false."
        )
    else:
        yield (
            f"{N} is 1, but with {SAMPLING}.enable true every group of one is uniform and would be dropped; "
            f"set n to 2 or more, or switch dynamic sampling off."
        )


def _without_effect(config: Config) -> Iterator[str]:
    for name in ("metric", "max_num_gen_batches", "on_exhausted"):
        value = getattr(config.algorithm.filter_groups, name)
        if value != known_keys()[f"{GROUPS}.{name}"].default:
            yield (
                f"{GROUPS}.{name} is {value}, but has no effect while {GROUPS}.enable is false; remove it, or set "
                f"enable to true."
            )


SAMPLING_CHECKS = (gen_batches, masking, filter_groups, group_size)
