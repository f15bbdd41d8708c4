"""Checks tokens and log-probs of a server's answer or a batch file: can a model sample them?"""

import math

import numpy as np

from megatron_dapo.data.samples import Branch, Sample

HIGHEST_LOG_PROB = 2.0**-10
"""x - logsumexp(x) is 0 or below but for rounding.

Logits are far below 2^13 in size; there a float32 logsumexp is rounded by at most 2^-11. The
difference of two such neighbours is exact.
"""
LOWEST_LOG_PROB = -160.0 * math.log(2.0)
"""-110.9. A token is drawn by its float32 probability; the smallest above 0 is 2^-149.

The bound is a little below its logarithm, for the rounding of exp at numbers near it, and of a
log-prob computed in bfloat16.
"""


def find_fault(tokens: np.ndarray, log_probs: np.ndarray, vocab_size: int) -> str | None:
    """Return the fault of tokens or log-probs that no model can sample; None without one.

    It is the end of a sentence.
    """
    if len(tokens) != len(log_probs):
        return f"has {len(tokens)} tokens, but {len(log_probs)} log-probs"
    return _token_fault(tokens, vocab_size) or _log_prob_fault(log_probs)


def find_sample_fault(sample: Sample, vocab_size: int) -> str | None:
    """Return the same for a sample: its reward, and of each branch the prompt and the lengths of its
    arrays."""
    if not all(type(reward) in (float, int) and math.isfinite(reward) for reward in (sample.reward, sample.raw_reward)):
        return f"has the reward {sample.reward}, before shaping {sample.raw_reward}"
    for number, branch in enumerate(sample.branches, 1):
        if fault := _branch_fault(branch, vocab_size):
            return f"{fault} (branch {number} of {len(sample.branches)})" if sample.others else fault
    return None


def _branch_fault(branch: Branch, vocab_size: int) -> str | None:
    lengths = {len(branch.loss_mask), len(branch.weight_versions), len(branch.response_tokens)}
    if len(lengths) > 1:
        return f"has {sorted(lengths)} tokens in its response, loss mask and weight versions"
    return _token_fault(branch.prompt_tokens, vocab_size) or find_fault(
        branch.response_tokens, branch.rollout_log_probs, vocab_size
    )


def _token_fault(tokens: np.ndarray, vocab_size: int) -> str | None:
    is_outside = (tokens < 0) | (tokens >= vocab_size)
    if not is_outside.any():
        return None
    return f"has the token id {tokens[is_outside][0]}, outside the model's vocabulary of {vocab_size}"


def _log_prob_fault(log_probs: np.ndarray) -> str | None:
    is_possible = (log_probs >= LOWEST_LOG_PROB) & (log_probs <= HIGHEST_LOG_PROB)  # NaN fails both
    if is_possible.all():
        return None
    return f"has the log-prob {log_probs[~is_possible][0]:g}, which no sampled token can have"
