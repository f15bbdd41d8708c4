"""Whether the longest sample fits into a micro-batch."""

from collections.abc import Iterator

from megatron_dapo.config.derived import longest_micro_batch_sample, longest_sample
from megatron_dapo.config.key_names import LENGTHS, MEGATRON
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema.config import Config


def fits_longest_sample(config: Config, key: str, cap: int, cure: str = "raise it") -> Iterator[Mistake]:
    """Yield a mistake where the longest sample has more tokens than `key`, which is `cap`, allows a micro-batch.

    If the sample is too long even without padding, the sentence says that length, and no key of the padding can cure
    it.
    """
    longest, padded = longest_sample(config), longest_micro_batch_sample(config)
    if cap >= padded:
        return
    if config.sft.enable:
        sample, words, lengths = "conversation", f"sft.max_length {config.sft.max_length}", ["sft.max_length"]
    else:
        sample, words, lengths = "sample", sum_in_words(config), [*LENGTHS]
    needed = longest
    if cap >= longest:
        needed = padded
        words += ", padded for sequence and context parallelism, FP8 and tp_comm_overlap"
        lengths += _padding_keys(config)
    yield Mistake((key, *lengths), f"{key} is {cap}, too small for one {sample} of {needed} tokens ({words}); {cure}.")


def sum_in_words(config: Config) -> str:
    """Return the two lengths that make the longest sample of reinforcement learning."""
    data = config.data
    return f"data.max_prompt_length {data.max_prompt_length} + data.max_response_length {data.max_response_length}"


def _padding_keys(config: Config) -> Iterator[str]:
    """Yield the keys of which another value alone would change what `longest_micro_batch_sample` pads for."""
    megatron = config.actor_rollout_ref.actor.megatron
    yield f"{MEGATRON}.context_parallel_size"
    yield f"{MEGATRON}.fp8"
    yield f"{MEGATRON}.tp_comm_overlap"
    if megatron.sequence_parallel:
        yield f"{MEGATRON}.tensor_model_parallel_size"
    if megatron.tensor_model_parallel_size > 1:
        yield f"{MEGATRON}.sequence_parallel"
    if megatron.fp8 != "none":
        yield f"{MEGATRON}.fp8_recipe"
