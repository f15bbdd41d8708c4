"""Overlong reward shaping: the linear soft punishment, or only a punishment of truncated
responses."""

from collections.abc import Callable
from dataclasses import dataclass

# How truncation_penalty acts on the reward of a truncated response.
TRUNCATION_MODES: dict[str, Callable[[float, float], float]] = {
    "additive": lambda reward, penalty: reward + penalty,
    # -1 would rise to -0.5
    "multiplicative": lambda reward, penalty: min(reward, reward * (1.0 + penalty)),
    "replace_if_positive": lambda reward, penalty: penalty if reward > 0 else reward,
    "cap": lambda reward, penalty: min(reward, penalty) if reward > 0 else reward,
}


@dataclass(frozen=True)
class OverlongShaping:
    """Settings of `shape`. Lengths in tokens."""

    max_response_length: int
    buffer_len: int = 0
    """Above 0: linear soft punishment; 0: only of truncated responses."""
    expected_len: int | None = None
    """None: max_response_length - buffer_len."""
    penalty_factor: float = 1.0
    """At least 0."""
    truncation_penalty: float = -0.5
    mode: str = "additive"


def overlong_penalty(num_tokens: int, expected_len: int, buffer_len: int, penalty_factor: float) -> float:
    """Return 0 up to expected_len, then linear to -penalty_factor at expected_len + buffer_len, and
    that beyond.

    DAPO (arXiv 2503.14476) eq. 13, where expected_len = max_response_length - buffer_len.
    buffer_len > 0.
    """
    excess = min(max(num_tokens - expected_len, 0), buffer_len)
    return -penalty_factor * excess / buffer_len


def shape(
    raw_reward: float, num_tokens: int, is_truncated: bool, shaping: OverlongShaping | None
) -> tuple[float, float]:
    """Return (reward after shaping, its change) for a response of num_tokens.

    shaping: None leaves the reward as it is.
    """
    if shaping is None:
        return raw_reward, 0.0
    if shaping.buffer_len:
        expected_len = shaping.expected_len
        if expected_len is None:
            expected_len = shaping.max_response_length - shaping.buffer_len
        penalty = overlong_penalty(num_tokens, expected_len, shaping.buffer_len, shaping.penalty_factor)
        return raw_reward + penalty, penalty
    if not is_truncated:
        return raw_reward, 0.0
    reward = TRUNCATION_MODES[shaping.mode](raw_reward, shaping.truncation_penalty)
    return reward, reward - raw_reward
