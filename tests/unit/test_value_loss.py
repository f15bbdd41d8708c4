"""The critic's loss and explained variance, against loops from the seeds and the definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms.aggregation import token_weights
from megatron_dapo.algorithms.metrics import finalize
from megatron_dapo.algorithms.value_loss import VALUE_LOSSES, explained_variance_sums, value_loss
from tests.metric_sums import add_sums

pytestmark = pytest.mark.unit

NUMBER = st.floats(-4, 4)


def float64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def by_definition(value, old, target, clip, loss_type) -> tuple[float, bool]:
    """One token: (loss, whether the clipped branch is the larger)."""

    def loss(v):
        error = abs(v - target)
        if loss_type == "l2":
            return error**2
        return 0.5 * error**2 if error <= 1.0 else error - 0.5

    if clip is None:
        return loss(value), False
    clipped = loss(min(max(value, old - clip), old + clip))
    return max(loss(value), clipped), clipped > loss(value)


@given(
    st.lists(st.tuples(NUMBER, NUMBER, NUMBER, st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12),
    st.sampled_from([None, 0.2, 1.0]),
    st.sampled_from(sorted(VALUE_LOSSES)),
)
@settings(deadline=None, max_examples=150)
def test_the_loss_is_the_larger_of_both_branches_summed_by_weight(tokens, clip, loss_type):
    values, old, returns, weights = (float64(column) for column in zip(*tokens, strict=True))
    result = value_loss(values, old, returns, weights, torch.tensor(5), clip=clip, loss_type=loss_type)
    rows = [(*by_definition(v, o, r, clip, loss_type), v, w) for v, o, r, w in tokens]
    assert float(result.loss_sum) == pytest.approx(sum(w * loss for loss, _, _, w in rows), rel=1e-12, abs=1e-12)
    counted = [row for row in rows if row[3]]
    metrics = finalize(result.sums)
    assert metrics["critic/vf_loss"] == pytest.approx(float(result.loss_sum) / 5)
    if counted:
        assert metrics["critic/vf_clipfrac"] == pytest.approx(np.mean([is_clipped for _, is_clipped, _, _ in counted]))
        assert metrics["critic/value_mean"] == pytest.approx(np.mean([v for _, _, v, _ in counted]), abs=1e-12)
    else:
        assert metrics.keys() == {"critic/vf_loss"}


@pytest.mark.parametrize(
    "value, old, target, loss, gradient",
    [
        (1.0, 1.0, 3.0, 4.0, -4.0),  # within the clip: plain l2
        (2.0, 1.0, 3.0, 1.8**2, 0.0),  # went towards the return farther than allowed: the clipped branch, which is flat
        (0.0, 1.0, 3.0, 9.0, -6.0),  # went away from it: the plain branch is the larger, and pulls back
        (3.5, 1.0, 3.0, 1.8**2, 0.0),  # overshot, but is nearer than the clip: still flat
    ],
)
def test_every_branch_by_hand(value, old, target, loss, gradient):
    values = float64([value]).requires_grad_()
    result = value_loss(values, float64([old]), float64([target]), float64([1.0]), torch.tensor(1), clip=0.2)
    result.loss_sum.backward()
    assert float(result.loss_sum.detach()) == pytest.approx(loss)
    assert values.grad.tolist() == pytest.approx([gradient])


def test_the_classic_loss_is_half_of_the_mean():
    """0.5 * max((v - R)^2, (v_clipped - R)^2).mean() of the seed on classic control,
    with its way to clip."""
    rng = np.random.default_rng(0)
    values, old, returns = rng.normal(size=(3, 50))
    clipped = old + np.clip(values - old, -0.2, 0.2)
    expected = 0.5 * np.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()
    result = value_loss(*map(torch.tensor, (values, old, returns)), torch.ones(50), torch.tensor(50), clip=0.2)
    assert float(0.5 * result.loss_sum / 50) == pytest.approx(expected, rel=1e-12)


def test_huber_is_huber_in_the_clipped_branch_too():
    arguments = (float64([0.0]), float64([-9.0]), float64([0.5]), float64([1.0]), torch.tensor(1))
    # |-8 - 0.5| - 0.5
    assert float(value_loss(*arguments, clip=1.0, loss_type="huber").loss_sum) == 8.0
    assert float(value_loss(*arguments, clip=1.0, loss_type="l2").loss_sum) == 8.5**2


@pytest.mark.parametrize("loss_type", sorted(VALUE_LOSSES))
@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradients_equal_finite_differences(loss_type, clip):
    """Values away from the kinks: |V - V_old| = clip, equal branches, and |V - R| = 1 of huber."""
    old, returns = float64([0.0, 0.0, 0.0, 1.0, -2.0, 0.3]), float64([3.0, 0.5, -0.4, 1.1, 5.0, 0.3])
    values = float64([0.1, -0.7, 0.15, 4.0, -1.0, 0.25]).requires_grad_()
    weights = float64([1.0, 0.5, 1.0, 2.0, 1.0, 0.0])

    def loss(v):
        return value_loss(v, old, returns, weights, torch.tensor(6), clip=clip, loss_type=loss_type).loss_sum

    assert torch.autograd.gradcheck(loss, (values,))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_counted_leaks_neither_values_nor_gradients(bad):
    weights = float64([1.0, 0.0])
    for place in range(3):
        tensors = [float64([0.1, 0.2]) for _ in range(3)]
        tensors[place][1] = bad
        values = tensors[0].requires_grad_()
        result = value_loss(*tensors, weights, torch.tensor(1))
        result.loss_sum.backward()
        assert float(result.loss_sum.detach()) == 0.0 and values.grad.tolist() == [0.0, 0.0]
        assert finalize(result.sums)["critic/value_mean"] == pytest.approx(0.1)


def test_a_batch_where_nothing_counts_gives_zeros():
    values = torch.zeros(1, 4, requires_grad=True)
    nothing = torch.zeros(1, 4)
    weights, count = token_weights("token-mean", nothing, nothing.long(), 1, 4)
    result = value_loss(values, nothing, nothing, weights, count)
    result.loss_sum.backward()
    assert float(result.loss_sum.detach()) == 0.0 and not values.grad.any() and finalize(result.sums) == {}


# ------------------------------------------------------------------------------- explained variance


@given(st.lists(st.tuples(NUMBER, NUMBER, st.booleans()), min_size=1, max_size=20), st.integers(0, 20))
@settings(deadline=None, max_examples=100)
def test_explained_variance_is_that_of_all_pieces_together(tokens, cut):
    values, returns, counted = (torch.tensor(column) for column in zip(*tokens, strict=True))
    ranges = (slice(None, cut), slice(cut, None))
    parts = [explained_variance_sums(values[p].double(), returns[p].double(), counted[p].bool()) for p in ranges]
    metrics = finalize(add_sums(*parts))
    kept = [(v, r) for v, r, c in zip(values.double().tolist(), returns.double().tolist(), counted, strict=True) if c]
    if not kept:
        assert metrics == {}
        return
    v, r = np.array(kept).T
    assert metrics["critic/return_mean"] == pytest.approx(r.mean(), abs=1e-12)
    if np.var(r) > 1e-3:
        assert metrics["critic/explained_variance"] == pytest.approx(1 - np.var(r - v) / np.var(r), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6 + 0.1])
def test_of_equal_returns_there_is_no_variance_to_explain(constant):
    returns, values = torch.full((7,), constant, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    assert finalize(explained_variance_sums(values, returns, torch.ones(7).bool()))["critic/explained_variance"] == 0.0
