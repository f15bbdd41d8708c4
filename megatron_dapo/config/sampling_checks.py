"""What the two forms of dynamic sampling demand of the other keys."""

from collections.abc import Iterator

from megatron_dapo.config.derived import gen_batch_size, uses_dynamic_sampling, uses_filter_mode
from megatron_dapo.config.inert_checks import CORRECTION, GROUPS, SAMPLING
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema import Config

N = "actor_rollout_ref.rollout.n"
STALENESS = "actor_rollout_ref.rollout.max_staleness"
# what `uses_filter_mode` and `uses_dynamic_sampling` read
FILTER_MODE = ("algorithm.dapo.enable", f"{SAMPLING}.enable", f"{SAMPLING}.filter_mode")
SWITCHES = (*FILTER_MODE, f"{GROUPS}.enable")


def gen_batches(config: Config) -> Iterator[Mistake]:
    size, prompts, dapo = config.data.train_batch_size, gen_batch_size(config), config.algorithm.dapo
    if not uses_dynamic_sampling(config):
        if prompts != size:
            yield Mistake(
                ("data.gen_batch_size", "data.train_batch_size", *SWITCHES),
                f"data.gen_batch_size is {prompts}, but has no effect while nothing is filtered: with dynamic sampling "
                f"off a step is one gen batch of data.train_batch_size {size}; set it to null, or enable {SAMPLING} "
                f"with a filter_mode other than none.",
            )
        return
    section, limit = SAMPLING, dapo.dynamic_sampling.max_num_gen_batches
    if config.algorithm.filter_groups.enable:
        section, limit = GROUPS, config.algorithm.filter_groups.max_num_gen_batches
    if 0 < limit and prompts * limit < size:
        yield Mistake(
            ("data.gen_batch_size", "data.train_batch_size", f"{section}.max_num_gen_batches", *SWITCHES),
            f"data.gen_batch_size {prompts} x {section}.max_num_gen_batches {limit} prompts can never fill "
            f"data.train_batch_size {size}; raise one of the first two.",
        )


def masking(config: Config) -> Iterator[Mistake]:
    """Of form mask, a step is one gen batch, and as large as the training batch. What limits the number of gen batches
    may stay as it is for the other form."""
    if config.algorithm.dapo.dynamic_sampling.form != "mask":
        return
    if not uses_filter_mode(config):
        yield Mistake(
            (f"{SAMPLING}.form", *FILTER_MODE),
            f"{SAMPLING}.form is mask, but nothing is filtered that it could mask; enable algorithm.dapo and "
            f"{SAMPLING} with a filter_mode other than none, or remove form.",
        )
        return
    size, prompts = config.data.train_batch_size, gen_batch_size(config)
    if prompts != size:
        yield Mistake(
            (f"{SAMPLING}.form", "data.gen_batch_size", "data.train_batch_size"),
            f"data.gen_batch_size is {prompts}, but with {SAMPLING}.form mask a step is one gen batch of "
            f"data.train_batch_size {size}; set gen_batch_size to null, or form to resample.",
        )


def filter_groups(config: Config) -> Iterator[Mistake]:
    groups = config.algorithm.filter_groups
    if not groups.enable:
        return
    if config.algorithm.dapo.dynamic_sampling.enable:
        yield Mistake(
            (f"{GROUPS}.enable", f"{SAMPLING}.enable"),
            f"{GROUPS}.enable and {SAMPLING}.enable are both true, but a group is judged once; keep the first for the "
            f"spread of a metric, or the second for right and wrong answers.",
        )


def group_size(config: Config) -> Iterator[Mistake]:
    if config.actor_rollout_ref.rollout.n > 1 or not uses_dynamic_sampling(config):
        return
    if config.algorithm.filter_groups.enable:
        yield Mistake(
            (N, f"{GROUPS}.enable"),
            f"{N} is 1, but {GROUPS}.enable is true, which compares the responses of a group; "
            f"set n to 2 or more, or enable to false.",
        )
    else:
        yield Mistake(
            (N, *SWITCHES),
            f"{N} is 1, but with {SAMPLING}.enable true every group of one is uniform and would be dropped; "
            f"set n to 2 or more, or switch dynamic sampling off.",
        )


def staleness(config: Config) -> Iterator[Mistake]:
    """What earlier weights wrote has other log-probs than those that the loss takes for old."""
    max_staleness = config.actor_rollout_ref.rollout.max_staleness
    if max_staleness and config.algorithm.rollout_correction.rollout_is == "none":
        yield Mistake(
            (STALENESS, f"{CORRECTION}.rollout_is"),
            f"{STALENESS} is {max_staleness}, but {CORRECTION}.rollout_is is none, so that groups of earlier weights "
            f"would be trained on as if the current ones had written them; set rollout_is to token, or max_staleness "
            f"to 0.",
        )


SAMPLING_CHECKS = (gen_batches, masking, filter_groups, group_size, staleness)
