"""Promises of metric sums and of the comparison between server and trainer."""

import math

import numpy as np
import pytest
import torch

from megatron_dapo.algorithms.metrics import (
    finalize,
    stack_maxima,
    stack_sums,
    unstack_maxima,
    unstack_sums,
)
from megatron_dapo.algorithms.mismatch_sums import mismatch_sums

pytestmark = pytest.mark.unit


def pair(total: float, count: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(total, dtype=torch.float64), torch.tensor(count, dtype=torch.float64)


def test_sums_with_different_counts_are_not_a_mean_of_means():
    names = ("a", "b")
    parts = [{"a": pair(10, 1)}, {"a": pair(0, 9), "b": pair(3, 2)}]
    total = sum(stack_sums(part, names, "cpu") for part in parts)
    assert finalize(unstack_sums(total, names)) == {"a": 1.0, "b": 1.5}


def test_what_counted_nothing_is_left_out():
    assert finalize({"a": pair(0, 0), "b": pair(0, 1)}, {"m": torch.tensor(2.0)}) == {"b": 0.0, "m": 2.0}


def test_names_with_an_underscore_only_feed_derived_metrics():
    assert finalize({"_hidden": pair(1, 1)}) == {}


def test_stacked_sums_of_ranks_add_up():
    names = ("a", "b")
    rank0 = stack_sums({"b": pair(1, 2), "a": pair(5, 1)}, names, "cpu")
    rank1 = stack_sums({"b": pair(2, 1)}, names, "cpu")  # a rank that never saw "a"
    assert rank0.shape == (2, 2) and finalize(unstack_sums(rank0 + rank1, names)) == {"a": 5.0, "b": 1.0}
    assert stack_sums({}, (), "cpu").shape == (0, 2)


def test_stacked_maxima_of_ranks_merge():
    names = ("a", "b")
    ranks = [stack_maxima({"a": torch.tensor(x)}, names, "cpu") for x in (1.0, 4.0)]
    assert finalize({}, unstack_maxima(torch.maximum(*ranks), names)) == {"a": 4.0, "b": 0.0}


def test_counts_beyond_float32_stay_exact():
    parts = [{"a": pair(2.0**24, 2.0**24)}, {"a": pair(1, 1)}]
    total = sum(stack_sums(part, ("a",), "cpu") for part in parts)
    assert total.tolist() == [[2.0**24 + 1] * 2]


def test_mismatch_by_hand():
    trainer = torch.tensor([[-1.0, -2.0, -9.0]], dtype=torch.float64)
    rollout = torch.tensor([[-1.5, -1.9, math.nan]], dtype=torch.float64)
    sums, maxima = mismatch_sums(trainer, rollout, torch.tensor([[True, True, False]]))
    shown = finalize(sums, maxima)
    diff = np.array([0.5, -0.1])
    weight = np.exp(diff)
    expected = {
        "actor/rollout_kl": -diff.mean(),
        "actor/rollout_k3": (weight - 1 - diff).mean(),
        "actor/rollout_abs_diff": 0.3,
        "actor/rollout_abs_diff_max": 0.5,
        "actor/rollout_ess": weight.sum() ** 2 / (2 * (weight**2).sum()),
    }
    assert shown == pytest.approx(expected)


def test_a_server_that_agrees_shows_no_mismatch():
    log_probs = -torch.rand(3, 4)
    sums, maxima = mismatch_sums(log_probs, log_probs, torch.ones(3, 4, dtype=torch.bool))
    shown = finalize(sums, maxima)
    assert shown.pop("actor/rollout_ess") == 1.0 and set(shown.values()) == {0.0}


def test_a_wild_difference_is_shown_but_does_not_overflow():
    sums, maxima = mismatch_sums(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([True]))
    shown = finalize(sums, maxima)
    assert shown["actor/rollout_abs_diff_max"] == 500.0 and shown["actor/rollout_kl"] == -500.0
    assert shown["actor/rollout_k3"] == pytest.approx(math.exp(20) - 21)
    assert shown["actor/rollout_ess"] == pytest.approx(1.0)


def test_small_differences_keep_their_digits_in_float32():
    sums, _ = mismatch_sums(torch.tensor([1e-5]), torch.tensor([0.0]), torch.tensor([True]))
    assert finalize(sums)["actor/rollout_k3"] == pytest.approx(5e-11, rel=1e-4, abs=0)
