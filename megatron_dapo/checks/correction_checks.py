"""Checks across the keys of `algorithm.rollout_correction`."""

from collections.abc import Iterator

from megatron_dapo.config.derived import rejects_tokens
from megatron_dapo.config.key_names import CORRECTION
from megatron_dapo.config.keys import show_text
from megatron_dapo.config.ratio_bounds import ratio_bounds, rejection_bounds
from megatron_dapo.config.schema.config import Config

_RATIO_WANTED = "bounds lower_upper with lower < 1 < upper, such as 0.99_1.01, or the upper one alone"
_REJECTION_WANTED = {
    "token_k1": _RATIO_WANTED,
    "seq_mean_k1": _RATIO_WANTED,
    "seq_mean_k3": "one upper bound, such as 0.01",
}


def _importance_threshold(config: Config) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    key = f"{CORRECTION}.rollout_is_threshold"
    if correction.rollout_is == "none":
        return
    try:
        bounds = ratio_bounds(correction.rollout_is_threshold)
    except ValueError:
        bounds = None
    if bounds is None or bounds.high < 1 or (bounds.low is not None and not bounds.low < 1 < bounds.high):
        yield (
            f"{key} is {correction.rollout_is_threshold}, but must be the largest weight, at least 1, such as "
            f"2.0, or bounds lower_upper with lower < 1 < upper, such as 0.5_5.0; correct it."
        )


def _rejection_threshold(config: Config) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    mode = correction.rollout_rs
    key = f"{CORRECTION}.rollout_rs_threshold"
    if mode == "none":
        return
    try:
        low, high = rejection_bounds(correction)
        fits = low is None or low < 1 < high
    except ValueError:
        fits = False
    if not fits:
        yield (
            f"{key} is {show_text(correction.rollout_rs_threshold)}, but {CORRECTION}.rollout_rs {mode} needs "
            f"{_REJECTION_WANTED[mode]}; set it, or rollout_rs to none."
        )


def _weights_without_old_log_probs(config: Config) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode and correction.rollout_is != "none":
        yield (
            f"{CORRECTION}.bypass_mode is true, with which the servers' log-probs are the old ones and every weight of "
            f"rollout_is {correction.rollout_is} would be 1; set rollout_is to none, or bypass_mode to false."
        )


def _rejection_without_old_log_probs(config: Config) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode and rejects_tokens(config):
        yield (
            f"{CORRECTION}.bypass_mode is true, but does without the old log-probs that decide what rollout_rs "
            f"{correction.rollout_rs} and rollout_token_veto_threshold "
            f"{show_text(correction.rollout_token_veto_threshold)} reject; set bypass_mode to false, or rollout_rs to "
            f"none and the veto to null."
        )


CORRECTION_CHECKS = (
    _importance_threshold,
    _rejection_threshold,
    _weights_without_old_log_probs,
    _rejection_without_old_log_probs,
)
