"""Whether the longest sample fits into a micro-batch."""

from collections.abc import Iterator

from megatron_dapo.config.derived import longest_micro_batch_sample, longest_sample
from megatron_dapo.config.schema.config import Config


def fits_longest_sample(config: Config, key: str, cap: int, cure: str = "raise it") -> Iterator[str]:
    """Yield a mistake if the longest sample is over `cap` tokens, the value of `key` for a
    micro-batch.

    A sample too long even without padding is reported by that length: no padding key can cure it.
    """
    needed = longest_sample(config)
    padding = ""
    if cap >= needed:
        needed = longest_micro_batch_sample(config)
        padding = ", padded for sequence and context parallelism, FP8 and tp_comm_overlap"
    if cap < needed:
        sample = "conversation" if config.sft.enable else "sample"
        words = f"{longest_in_words(config)}{padding}"
        yield f"{key} is {cap}, too small for one {sample} of {needed} tokens ({words}); {cure}."


def longest_in_words(config: Config) -> str:
    """Return the keys behind the longest sample's length, with their values."""
    if config.sft.enable:
        return f"sft.max_length {config.sft.max_length}"
    data = config.data
    return f"data.max_prompt_length {data.max_prompt_length} + data.max_response_length {data.max_response_length}"
