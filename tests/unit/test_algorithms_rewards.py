"""Promises of advantages, reward shaping, dynamic-sampling filters and KL control."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms.estimators import GroupRewards, grpo, maxrl, remax, rloo
from megatron_dapo.algorithms.kl import FULL_KL, KL_CONTROLLERS, KL_PENALTIES, kl_penalty
from megatron_dapo.config.schema.algorithm import OverlongRewardShapingConfig
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Sample
from megatron_dapo.queue.group_filter import FILTER_METRICS, FILTER_MODES, has_spread
from megatron_dapo.rewards.shaping import TRUNCATION_MODES, overlong_penalty, shape, unshaped

pytestmark = pytest.mark.unit

REWARDS = st.lists(st.floats(-5, 5), min_size=2, max_size=16)


def float64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def group_of(rewards, **others) -> GroupRewards:
    """A group with the rewards that an estimator may read, and its other inputs."""
    nothing = torch.full((len(rewards),), torch.nan)
    return GroupRewards(float64(rewards), nothing, nothing, nothing, **others)


# --------------------------------------------------------------------------------------- advantages


@given(REWARDS)
@settings(deadline=None)
def test_advantages_equal_the_formula_and_sum_to_zero(rewards):
    ours = grpo(group_of(rewards))
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-8)
    assert abs(float(ours.sum())) < 1e-7
    centered = grpo(group_of(rewards, normalize_by_std=False))
    np.testing.assert_allclose(centered, np.array(rewards) - np.mean(rewards), atol=1e-12)


@given(REWARDS, st.floats(-10, 10), st.floats(0.5, 3))
@settings(deadline=None)
def test_advantages_ignore_shift_and_scale_of_the_rewards(rewards, shift, scale):
    if np.std(rewards) < 0.1:
        return
    moved = grpo(group_of(np.array(rewards) * scale + shift))
    np.testing.assert_allclose(moved, grpo(group_of(rewards)), rtol=1e-4, atol=1e-4)


def test_the_deviation_is_unbiased():
    assert grpo(group_of([1.0, 0.0])).tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5)


def test_a_group_of_one_has_mean_0_and_deviation_1():
    assert float(grpo(group_of([3.0]))) == pytest.approx(3.0, rel=1e-5)
    assert float(grpo(group_of([3.0], normalize_by_std=False))) == 3.0


def test_eps_bounds_the_division():
    assert grpo(group_of([1.0, 1.0])).tolist() == [0.0, 0.0]
    tiny = math.sqrt(2.0) * 1e-6  # a deviation as small as eps
    assert grpo(group_of([tiny, 0.0])).tolist() == pytest.approx([math.sqrt(0.125), -math.sqrt(0.125)])


@given(REWARDS)
@settings(deadline=None)
def test_leave_one_out_compares_with_the_mean_of_the_others(rewards):
    others = [(sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    expected = np.array(rewards) - others
    np.testing.assert_allclose(rloo(group_of(rewards)), expected, rtol=1e-9, atol=1e-9)


def test_alone_there_is_nobody_to_leave_out():
    assert rloo(group_of([3.0])).tolist() == [3.0]


@given(REWARDS, st.floats(-5, 5))
@settings(deadline=None, max_examples=50)
def test_remax_compares_with_the_greedy_answer(rewards, baseline):
    ours = remax(group_of(rewards, baseline=baseline))
    np.testing.assert_allclose(ours, np.array(rewards) - baseline, atol=1e-12)


@pytest.mark.parametrize("num_right", range(9))
def test_maxrl_averages_over_right_responses_alone_and_centres_them(num_right):
    """Its paper's theorem 2: 1 / K of the sum of the K right ones' scores, minus the mean score of
    all N; token losses divide by N."""
    rewards = [1.0] * num_right + [0.0] * (8 - num_right)
    of_scores = [(reward / num_right - 1 / 8) if num_right else 0.0 for reward in rewards]
    np.testing.assert_allclose(maxrl(group_of(rewards)) / 8, of_scores, rtol=1e-12, atol=1e-15)


def test_maxrl_learns_nothing_of_a_group_with_a_negative_mean():
    assert maxrl(group_of([1.0, -1.0, -1.0])).tolist() == [0.0] * 3
    assert maxrl(group_of([0.5, 0.3])).tolist() == pytest.approx([0.25, -0.25])


@pytest.mark.parametrize("reward", [0.0, 0.1, -1.0, 1e6 + 0.1])
def test_of_equal_rewards_nobody_is_better(reward):
    equal = group_of([reward] * 7, baseline=reward)
    assert all(estimate(equal).abs().max() < 1e-3 for estimate in (grpo, maxrl, rloo))
    assert remax(equal).tolist() == [0.0] * 7


# ------------------------------------------------------------------------------------------ shaping


def shaped(raw, num_tokens, is_truncated, max_response_length=20, **keys):
    return shape(raw, num_tokens, is_truncated, OverlongRewardShapingConfig(**keys), max_response_length)


@pytest.mark.parametrize(
    "num_tokens, penalty", [(0, 0.0), (16, 0.0), (17, -0.5), (18, -1.0), (19, -1.5), (20, -2.0), (21, -2.0), (99, -2.0)]
)
def test_the_soft_punishment_is_linear_in_the_buffer_and_constant_beyond(num_tokens, penalty):
    # L = 20, B = 4, factor 2
    assert overlong_penalty(num_tokens, 16, 4, 2.0) == pytest.approx(penalty)
    assert shaped(1.0, num_tokens, False, buffer_len=4, penalty_factor=2.0) == pytest.approx(1.0 + penalty)


@given(st.integers(0, 60), st.integers(1, 30), st.integers(1, 20), st.floats(0.0, 5.0), st.floats(-3.0, 3.0))
def test_the_soft_punishment_is_the_documents_formula_and_ends_at_the_factor(num_tokens, expected, buffer, factor, raw):
    """min(-(length - expected) / buffer * factor, 0), as written down;
    beyond the buffer it stays (eq. 13)."""
    penalty = min(-(num_tokens - expected) / buffer * factor, 0.0)
    penalty = -factor if num_tokens > expected + buffer else penalty
    reward = shaped(raw, num_tokens, False, expected + buffer, buffer_len=buffer, penalty_factor=factor)
    assert reward == pytest.approx(raw + penalty, abs=1e-12)


def test_the_expected_length_moves_the_interval():
    rewards = [shaped(0.0, n, False, buffer_len=4, expected_len=10) for n in (10, 12, 14, 20)]
    assert rewards == pytest.approx([0.0, -0.5, -1.0, -1.0])


def test_with_a_buffer_truncation_is_punished_by_length_alone():
    assert shaped(1.0, 20, True, buffer_len=4, truncation_penalty=-7.0) == 0.0
    assert shaped(1.0, 5, True, buffer_len=4, truncation_penalty=-7.0) == 1.0


@pytest.mark.parametrize(
    "mode, raw, penalty, reward",
    [
        ("additive", 1.0, -0.5, 0.5),
        ("additive", -1.0, -0.5, -1.5),
        ("multiplicative", 1.0, -0.25, 0.75),
        ("multiplicative", 0.0, -0.25, 0.0),
        ("multiplicative", -1.0, -0.25, -1.0),
        ("multiplicative", -1.0, -2.0, -1.0),
        ("replace_if_positive", 1.0, -0.5, -0.5),
        ("replace_if_positive", 0.25, 0.5, 0.5),
        ("replace_if_positive", 0.0, -0.5, 0.0),
        ("replace_if_positive", -1.0, -0.5, -1.0),
        ("cap", 1.0, -0.5, -0.5),
        ("cap", 0.25, 0.5, 0.25),
        ("cap", 1.0, 0.5, 0.5),
        ("cap", 0.0, -0.5, 0.0),
        ("cap", -1.0, -0.5, -1.0),
    ],
)
def test_every_truncation_mode_by_hand(mode, raw, penalty, reward):
    keys = dict(truncation_penalty=penalty, soft_penalty_mode=mode)
    assert shaped(raw, 20, True, **keys) == pytest.approx(reward)
    assert shaped(raw, 20, False, **keys) == raw


@pytest.mark.parametrize("mode", TRUNCATION_MODES)
@given(raw=st.floats(-10, 10), penalty=st.floats(-10, 0))
def test_no_mode_ever_rewards_truncation(mode, raw, penalty):
    """Of rewards 0 and 1, and of -1 and 1."""
    assert shaped(raw, 20, True, truncation_penalty=penalty, soft_penalty_mode=mode) <= raw


def test_without_shaping_the_reward_stays():
    assert unshaped(1.0, 10**6, True) == 1.0


# ------------------------------------------------------------------------------------------ filters


@pytest.mark.parametrize(
    "mode, correct, reason",
    [
        ("strict", [True, True], "all_correct"),
        ("strict", [False, False], "all_incorrect"),
        ("strict", [True, False], None),
        ("remove_all_correct", [True, True], "all_correct"),
        ("remove_all_correct", [False, False], None),
        ("remove_all_correct", [True, False], None),
        ("remove_all_incorrect", [False, False], "all_incorrect"),
        ("remove_all_incorrect", [True, True], None),
        ("remove_all_incorrect", [False, True], None),
        ("none", [True, True], None),
        ("none", [False, False], None),
    ],
)
def test_filters_name_the_reason_or_keep(mode, correct, reason):
    assert FILTER_MODES[mode](correct) == reason


@given(st.lists(st.sampled_from([-1.0, 0.1, 0.3, 1e6 + 0.1]), min_size=1, max_size=8))
@settings(deadline=None)
def test_a_metric_has_a_spread_where_its_deviation_is_not_zero(values):
    assert has_spread(values) == (len(values) == 1 or len(set(values)) > 1)


def test_a_metric_is_a_field_of_a_sample():
    assert set(FILTER_METRICS) == {"acc", "score", "seq_reward", "seq_final_reward"}
    assert set(FILTER_METRICS.values()) <= set(Sample.__dataclass_fields__)


# ----------------------------------------------------------------------------------------------- KL


LOGIT = st.floats(-0.5, 0.5)  # log-ratios within +-2: far from the bounds of low_var_kl
DISTRIBUTIONS = st.lists(st.tuples(LOGIT, LOGIT), min_size=2, max_size=8)


@given(DISTRIBUTIONS)
@settings(deadline=None, max_examples=50)
def test_over_the_tokens_that_the_actor_draws_the_estimators_are_the_kl_or_have_its_gradient(logits):
    """Expectations over a small vocabulary: k1 and k3 are KL(actor, reference); the gradient of k2
    is the KL's."""
    scores, ref_scores = (float64(column) for column in zip(*logits, strict=True))
    scores.requires_grad_()
    actor, reference = scores.log_softmax(0), ref_scores.log_softmax(0)
    drawn = actor.detach().exp()
    exact = (actor.exp() * (actor - reference)).sum()
    for kind in ("kl", "low_var_kl"):
        assert float((drawn * kl_penalty(kind, actor, reference)).sum().detach()) == pytest.approx(
            float(exact.detach()), abs=1e-10
        )
    (gradient,) = torch.autograd.grad((drawn * kl_penalty("mse", actor, reference)).sum(), scores, retain_graph=True)
    (expected,) = torch.autograd.grad(exact, scores)
    np.testing.assert_allclose(gradient, expected, atol=1e-10)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_gradients_of_the_estimators_equal_finite_differences(kind):
    """Away from the kinks: log-probs that are equal (abs) and the bounds of low_var_kl."""
    log_probs, ref_log_probs = float64([-2.0, -0.5, -1.5, -0.1]), float64([-1.5, -0.9, -4.0, -0.3])
    inputs = (log_probs.requires_grad_(), ref_log_probs.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: kl_penalty(kind, a, b), inputs)


@pytest.mark.parametrize(
    "kind, value, gradient",
    [
        ("kl", -0.5, 1.0),
        ("abs", 0.5, -1.0),
        ("mse", 0.125, -0.5),
        ("low_var_kl", math.exp(0.5) - 1.5, 1 - math.exp(0.5)),
    ],
)
def test_every_kl_estimator_by_hand(kind, value, gradient):
    log_prob = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    kl = kl_penalty(kind, log_prob, float64([-1.5]))
    kl.sum().backward()
    assert float(kl.detach()) == pytest.approx(value) and float(log_prob.grad) == pytest.approx(gradient)


def test_low_variance_kl_is_bounded():
    log_prob = torch.tensor([-50.0, 0.0, -1.0], dtype=torch.float64)
    ref = torch.tensor([0.0, -50.0, -1.0], dtype=torch.float64)
    assert kl_penalty("low_var_kl", log_prob, ref).tolist() == [10.0, 10.0, 0.0]
    far = torch.tensor([-200.0], requires_grad=True)
    kl_penalty("low_var_kl", far, torch.zeros(1)).sum().backward()
    assert far.grad.tolist() == [0.0]


def test_a_fixed_coefficient_stays():
    controller = KL_CONTROLLERS["fixed"](0.02, 0.01, 100)
    controller.update(5.0, 100)
    assert controller.value == 0.02


@pytest.mark.parametrize("current, factor", [(0.011, 1.05), (0.009, 0.95), (5.0, 1.1), (0.0, 0.9), (0.01, 1.0)])
def test_an_adaptive_coefficient_follows_the_clipped_error(current, factor):
    # 50 samples of horizon 100: half of the error
    controller = KL_CONTROLLERS["adaptive"](0.02, 0.01, 100)
    controller.update(current, 50)
    assert controller.value == pytest.approx(0.02 * factor)


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_a_restored_controller_goes_on_where_it_was(kind):
    first, second = (KL_CONTROLLERS[kind](value, 0.01, 100) for value in (0.02, 0.5))
    first.update(1.0, 10)
    second.load_state_dict(first.state_dict())
    first.update(0.001, 10), second.update(0.001, 10)
    assert first.value == second.value


def test_the_tables_offer_what_the_config_allows():
    def choices(section, key: str) -> set[str]:
        args = type(section).model_fields[key].annotation.__args__
        return set(getattr(args[0], "__args__", args))  # with an import path beside them, or alone

    config = Config()
    assert choices(config.algorithm.dynamic_sampling, "filter_mode") == {*FILTER_MODES, *FILTER_METRICS}
    assert choices(config.algorithm.overlong_reward_shaping, "soft_penalty_mode") == set(TRUNCATION_MODES)
    assert choices(config.algorithm, "kl_penalty") == {*KL_PENALTIES, FULL_KL}
    assert choices(config.actor_rollout_ref.actor, "kl_loss_type") == {*KL_PENALTIES, FULL_KL}
    assert choices(config.algorithm.kl_ctrl, "type") == set(KL_CONTROLLERS)
