"""Whether tokens and their log-probs can be what a model sampled: asked of a server's answer and of a batch file."""

import math
from collections.abc import Sequence
from itertools import chain

from megatron_dapo.data.types import Sample

HIGHEST_LOG_PROB = 2.0**-10
"""x - logsumexp(x) is 0 or below but for rounding: the sum is rounded by at most 2^-11 where it is below 2^13, which
float32 logits are far below, and the difference of two such neighbours is exact."""
LOWEST_LOG_PROB = -160.0 * math.log(2.0)
"""-110.9. A token is drawn by its float32 probability, of which 2^-149 is the smallest that is not 0; a little below it
for the rounding of exp at numbers as small, and of a log-prob that is computed in bfloat16."""

_NUMBERS = (float, int)


def find_fault(tokens: Sequence[int], log_probs: Sequence[float], vocab_size: int) -> str | None:
    """Return what cannot be in tokens and their log-probs, as the end of a sentence; None where all can."""
    if len(tokens) != len(log_probs):
        return f"has {len(tokens)} tokens, but {len(log_probs)} log-probs"
    return _token_fault(tokens, vocab_size) or _log_prob_fault(log_probs)


def find_sample_fault(sample: Sample, vocab_size: int) -> str | None:
    """Return the same of a sample, with its prompt, its reward and the lengths of what it says of each token."""
    lengths = {len(sample.loss_mask), len(sample.weight_versions), len(sample.response_tokens)}
    if len(lengths) > 1:
        return f"has {sorted(lengths)} tokens in its response, loss mask and weight versions"
    if not all(type(reward) in _NUMBERS and math.isfinite(reward) for reward in (sample.reward, sample.raw_reward)):
        return f"has the reward {sample.reward}, before shaping {sample.raw_reward}"
    return _token_fault(sample.prompt_tokens, vocab_size) or find_fault(
        sample.response_tokens, sample.rollout_log_probs, vocab_size
    )


def _token_fault(tokens: Sequence[int], vocab_size: int) -> str | None:
    if any(kind is not int for kind in set(map(type, tokens))):
        return f"has the token id {next(token for token in tokens if type(token) is not int)!r}, no whole number"
    if not tokens or (0 <= min(tokens) and max(tokens) < vocab_size):
        return None
    outside = next(token for token in tokens if not 0 <= token < vocab_size)
    return f"has the token id {outside}, outside the model's vocabulary of {vocab_size}"


def _log_prob_fault(log_probs: Sequence[float]) -> str | None:
    if any(kind not in _NUMBERS for kind in set(map(type, log_probs))):
        return f"has the log-prob {next(value for value in log_probs if type(value) not in _NUMBERS)!r}, no number"
    ends = (min(log_probs), max(log_probs)) if log_probs else ()
    for value in chain(ends, () if all(map(math.isfinite, log_probs)) else log_probs):
        if not LOWEST_LOG_PROB <= value <= HIGHEST_LOG_PROB:
            return f"has the log-prob {value:g}, which no sampled token can have"
    return None
