"""Generalized advantage estimation and whitening, against formulas written from their papers."""

import pkgutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms.gae import TokenRewards, discounted_returns, gae, last_counted
from megatron_dapo.algorithms.whitening import moments, whiten
from megatron_dapo.config.built_ins import ESTIMATORS, estimators_with
from tests.advantage_oracle import OF_TOKENS, gae_by_definition

pytestmark = pytest.mark.unit

EXACT = dict(rtol=1e-12, atol=1e-12)
NUMBER = st.floats(-5, 5)


def float64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# -------------------------------------------------------------------------------------- the formula


@st.composite
def trajectories(draw):
    num_steps = draw(st.integers(1, 13))
    column = st.lists(NUMBER, min_size=num_steps, max_size=num_steps)
    flags = st.lists(st.booleans(), min_size=num_steps, max_size=num_steps)
    fraction = st.sampled_from([0.0, 0.5, 0.95, 1.0])
    return draw(column), draw(column), draw(flags), draw(flags), draw(NUMBER), draw(fraction), draw(fraction)


@given(trajectories())
@settings(deadline=None, max_examples=150)
def test_the_advantages_are_those_of_the_definition_for_any_mask_and_any_episodes(trajectory):
    rewards, values, mask, done, last_value, gamma, lam = trajectory
    advantages, returns = gae(
        float64(rewards),
        float64(values),
        gamma=gamma,
        lam=lam,
        mask=torch.tensor(mask),
        done=torch.tensor(done),
        last_value=float64(last_value),
    )
    expected = gae_by_definition(*trajectory)
    np.testing.assert_allclose(advantages, expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(returns, expected + np.where(mask, values, 0.0), rtol=1e-10, atol=1e-10)


def seed_of_language_models(rewards, values, mask, gamma, lam):
    """The loop of the seed on PPO for language models:
    it carries both state variables over masked positions."""
    next_value, running, reversed_ = 0.0, 0.0, []
    for t in reversed(range(rewards.shape[-1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        candidate = delta + gamma * lam * running
        next_value = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_value
        running = candidate * mask[:, t] + (1 - mask[:, t]) * running
        reversed_.append(running)
    advantages = torch.stack(reversed_[::-1], dim=1)
    return advantages, advantages + values


def seed_of_classic_control(rewards, values, done, last_value, gamma, lam):
    """The reverse scan of the seed on classic control."""
    running, next_value, reversed_ = torch.zeros_like(last_value), last_value, []
    for t in reversed(range(rewards.shape[-1])):
        delta = rewards[:, t] + gamma * next_value * (1.0 - done[:, t]) - values[:, t]
        running = delta + gamma * lam * (1.0 - done[:, t]) * running
        next_value = values[:, t]
        reversed_.append(running)
    advantages = torch.stack(reversed_[::-1], dim=1)
    return advantages, advantages + values


def random_case(seed: int, batch: int, num_steps: int):
    rng = torch.Generator().manual_seed(seed)
    shape = (batch, num_steps)
    rewards, values = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(2))
    flags = (torch.rand(shape, generator=rng) < 0.6).double()
    return rewards, values, flags, torch.randn(batch, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("num_steps", [1, 2, 64, 65, 3000])
def test_one_recursion_gives_what_both_seeds_give(num_steps):
    rewards, values, flags, last_value = random_case(num_steps, 3, num_steps)
    ours = gae(rewards, values, gamma=0.99, lam=0.95, mask=flags)
    for got, expected in zip(ours, seed_of_language_models(rewards, values, flags, 0.99, 0.95), strict=True):
        np.testing.assert_allclose(got[flags != 0], expected[flags != 0], **EXACT)
        assert not got[flags == 0].any()
    ours = gae(rewards, values, gamma=0.99, lam=0.95, done=1 - flags, last_value=last_value)
    of_seed = seed_of_classic_control(rewards, values, 1 - flags, last_value, 0.99, 0.95)
    for got, expected in zip(ours, of_seed, strict=True):
        np.testing.assert_allclose(got, expected, **EXACT)


def test_a_trajectory_by_hand():
    """Two turns of one token each around one token of the environment; gamma 0.5, lam 0.5."""
    advantages, returns = gae(
        float64([[0.0, 9.0, 1.0]]), float64([[0.5, 7.0, 0.25]]), gamma=0.5, lam=0.5, mask=torch.tensor([[1, 0, 1]])
    )
    # delta of the last: 1 - 0.25; of the first: 0.5 * 0.25 - 0.5, plus a quarter of the last
    assert advantages.tolist() == [[-0.375 + 0.25 * 0.75, 0.0, 0.75]]
    assert returns.tolist() == [[-0.375 + 0.25 * 0.75 + 0.5, 0.0, 1.0]]


def test_with_lam_1_returns_are_what_was_earned_and_with_lam_0_one_step():
    rewards, values, _, last_value = random_case(7, 2, 9)
    _, returns = gae(rewards, values, gamma=1.0, lam=1.0, last_value=last_value)
    earned = rewards.flip(-1).cumsum(-1).flip(-1) + last_value[:, None]
    np.testing.assert_allclose(returns, earned, **EXACT)
    advantages, _ = gae(rewards, values, gamma=0.9, lam=0.0, last_value=last_value)
    after = torch.cat([values[:, 1:], last_value[:, None]], dim=1)
    np.testing.assert_allclose(advantages, rewards + 0.9 * after - values, **EXACT)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_masked_is_not_even_read(bad):
    rewards, values, mask, _ = random_case(3, 2, 8)
    clean = gae(rewards, values, gamma=0.9, lam=0.8, mask=mask)
    spoilt = gae(*(torch.where(mask != 0, x, bad) for x in (rewards, values)), gamma=0.9, lam=0.8, mask=mask)
    for got, expected in zip(spoilt, clean, strict=True):
        assert torch.equal(got, expected)


def test_where_nothing_counts_nothing_is_estimated():
    for shape in ((2, 5), (1, 1), (0, 4)):
        ones = torch.ones(shape)
        for result in gae(ones, ones, gamma=0.9, lam=0.8, mask=torch.zeros(shape)):
            assert result.shape == shape and not result.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_results_have_the_dtype_of_the_values(dtype):
    rewards, values, mask, last_value = random_case(4, 2, 8)
    results = gae(rewards.to(dtype), values.to(dtype), gamma=0.9, lam=0.8, mask=mask, last_value=last_value)
    assert {result.dtype for result in results} == {dtype}


# --------------------------------------------------------------------------------- packed responses


@given(st.integers(0, 2**31), st.lists(st.integers(0, 6), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_responses_in_one_row_do_not_see_each_other(seed, lengths):
    """Packed: each response with a prompt before it and a last token that predicts nothing; some
    without any counted token."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        mask = rng.random(length) < 0.7
        rows.append((rng.normal(size=length + 2), rng.normal(size=length + 2), np.array([False, *mask, False])))
    segment_ids = torch.tensor(np.repeat(np.arange(len(rows)), [len(mask) for *_, mask in rows]))[None]
    rewards, values, counted = (torch.tensor(np.concatenate(column))[None] for column in zip(*rows, strict=True))
    is_end = last_counted(counted, segment_ids, len(rows))
    for name in estimators_with(per_token=True):
        estimate = pkgutil.resolve_name(ESTIMATORS[name].function)
        packed = estimate(TokenRewards(rewards, counted, is_end, values, 0.9, 0.8))
        for segment, (reward, value, mask) in enumerate(rows):
            ends = [t for t in range(len(mask)) if mask[t]][-1:]
            here = segment_ids[0] == segment
            assert is_end[0][here].nonzero().flatten().tolist() == ends
            expected = OF_TOKENS[name](reward[mask], value[mask], 0.9, 0.8)
            returns = expected + (value[mask] if ESTIMATORS[name].needs_critic else 0.0)
            for got, wanted in zip(packed, (expected, returns), strict=True):
                np.testing.assert_allclose(got[0][here][mask], wanted, **EXACT)
                assert not got[0][here][~mask].any()


def test_reinforce_plus_plus_discounts_what_is_still_to_come():
    rewards, everywhere = float64([[1.0, 5.0, 2.0]]), torch.tensor([[True, False, True]])
    tokens = TokenRewards(rewards, everywhere, torch.tensor([[False, False, True]]), None, 0.5, 0.3)
    advantages, _ = discounted_returns(tokens)
    assert advantages.tolist() == [[2.0, 0.0, 2.0]]


# ---------------------------------------------------------------------------------------- whitening


@given(
    st.lists(st.tuples(NUMBER, st.booleans()), min_size=2, max_size=30),
    st.floats(-1e3, 1e3),
    st.integers(1, 29),
)
@settings(deadline=None, max_examples=150)
def test_whitening_is_by_the_counted_values_of_all_pieces_together(pairs, offset, cut):
    values, mask = float64([offset + value for value, _ in pairs]), np.array([counts for _, counts in pairs])
    slices = [slice(None, cut), slice(cut, None)]
    total = sum(moments(values[part], torch.tensor(mask[part])) for part in slices)
    ours = whiten(values, total).numpy()
    kept = values.numpy()[mask]
    mean = kept.mean() if len(kept) else 0.0
    variance = kept.var(ddof=1) if len(kept) > 1 else 0.0
    if 0.0 < variance < 1e-3:
        return  # the one rounding of sums of squares of up to 1e6: 1e-10, small even by itself
    expected = (values.numpy() - mean) / np.sqrt(variance + 1e-8)
    np.testing.assert_allclose(ours[mask], expected[mask], rtol=1e-6, atol=1e-6)


def test_whitened_values_have_mean_0_and_deviation_1_without_bias():
    values = torch.randn(400, dtype=torch.float64) * 3 + 7
    whitened = whiten(values, moments(values, torch.ones(400)))
    assert float(whitened.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(whitened.std(unbiased=True)) == pytest.approx(1.0, rel=1e-8)
    pair = float64([1.0, 0.0])  # n - 1: the variance of 0 and 1 is one half
    assert whiten(pair, moments(pair, torch.ones(2))).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-7)


@pytest.mark.parametrize("values", [[0.1] * 7, [1e6 + 0.1] * 9, [3.0], []])
def test_equal_values_one_value_and_none_have_nothing_to_whiten(values):
    values = float64(values)
    whitened = whiten(values, moments(values, torch.ones(len(values))))
    assert torch.isfinite(whitened).all() and (whitened.abs() < 1e-5).all()


def test_moments_see_neither_nan_nor_values_that_do_not_count():
    values = torch.tensor([1.0, torch.nan, 3.0, torch.inf])
    counted = torch.tensor([1, 0, 1, 0])
    assert moments(values, counted).tolist() == [2.0, 4.0, 10.0]
    assert moments(values, torch.zeros(4)).tolist() == [0.0, 0.0, 0.0]
    assert torch.isnan(moments(values, torch.ones(4))[1])  # a counted one is not hidden
