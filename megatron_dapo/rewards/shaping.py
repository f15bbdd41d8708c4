"""Reward shaping: the linear soft punishment of long responses, or only one of truncated responses,
and a function of the user's own after it."""

from collections.abc import Callable
from dataclasses import replace

from megatron_dapo.common.own_function import OwnFunction, finite
from megatron_dapo.config.schema.algorithm import OverlongRewardShapingConfig
from megatron_dapo.data.samples import Prompt, Sample

Shaping = Callable[[float, int, bool], float]
"""Raw reward, number of tokens, whether truncated -> shaped reward."""

# How truncation_penalty acts on the reward of a truncated response.
TRUNCATION_MODES: dict[str, Callable[[float, float], float]] = {
    "additive": lambda reward, penalty: reward + penalty,
    # -1 would rise to -0.5
    "multiplicative": lambda reward, penalty: min(reward, reward * (1.0 + penalty)),
    "replace_if_positive": lambda reward, penalty: penalty if reward > 0 else reward,
    "cap": lambda reward, penalty: min(reward, penalty) if reward > 0 else reward,
}


def overlong_penalty(num_tokens: int, expected_len: int, buffer_len: int, penalty_factor: float) -> float:
    """Return the penalty of a response's length, from 0 to -penalty_factor.

    It is 0 up to expected_len, then linear up to expected_len + buffer_len, then -penalty_factor.

    DAPO (arXiv 2503.14476) eq. 13, with expected_len = max_response_length - buffer_len and
    buffer_len > 0.
    """
    excess = min(max(num_tokens - expected_len, 0), buffer_len)
    return -penalty_factor * excess / buffer_len


def unshaped(raw_reward: float, num_tokens: int, is_truncated: bool) -> float:
    """Return the reward as it is."""
    return raw_reward


def shape(
    raw_reward: float,
    num_tokens: int,
    is_truncated: bool,
    keys: OverlongRewardShapingConfig,
    max_response_length: int,
) -> float:
    """Return the reward after shaping, of a response of num_tokens."""
    if keys.buffer_len:
        expected_len = keys.expected_len
        if expected_len is None:
            expected_len = max_response_length - keys.buffer_len
        return raw_reward + overlong_penalty(num_tokens, expected_len, keys.buffer_len, keys.penalty_factor)
    if not is_truncated:
        return raw_reward
    return TRUNCATION_MODES[keys.soft_penalty_mode](raw_reward, keys.truncation_penalty)


def reshaped(shaping: OwnFunction | None, sample: Sample, prompt: Prompt) -> Sample:
    """Return the sample with the reward of the user's function (`reward.shaping`), if there is one.

    Raises UserError for an exception of it, and for anything but a finite number.
    """
    if shaping is None:
        return sample
    return replace(
        sample, reward=shaping(finite, "a finite number", f"a response of group {sample.uid}", sample, prompt)
    )
