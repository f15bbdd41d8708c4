"""What the two forms of dynamic sampling demand of the other keys. As in checks.py: one sentence per mistake."""

from collections.abc import Iterator

from megatron_dapo.config.derived import gen_batch_size, uses_dynamic_sampling, uses_filter_mode
from megatron_dapo.config.inert_checks import GROUPS, SAMPLING
from megatron_dapo.config.schema import Config

N = "actor_rollout_ref.rollout.n"


def gen_batches(config: Config) -> Iterator[str]:
    size, prompts, dapo = config.data.train_batch_size, gen_batch_size(config), config.algorithm.dapo
    if not uses_dynamic_sampling(config):
        if prompts != size:
            yield (
                f"data.gen_batch_size is {prompts}, but has no effect while nothing is filtered: with dynamic sampling "
                f"off a step is one gen batch of data.train_batch_size {size}; set it to null, or enable {SAMPLING} "
                f"with a filter_mode other than none."
            )
        return
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


SAMPLING_CHECKS = (gen_batches, masking, filter_groups, group_size)
