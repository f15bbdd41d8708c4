"""The one-call loss: its result equals the loss one token at a time, in float64."""

import pytest
import torch

from megatron_dapo.algorithms.dapo_loss import TokenOutputs, dapo_loss, metric_names
from megatron_dapo.algorithms.metrics import stack_maxima, stack_sums
from megatron_dapo.kernels.token_loss import token_loss
from tests.token_loss_oracle import (
    CASES,
    EVERYTHING,
    FLOAT32,
    FLOAT64,
    SEQUENCE_CASES,
    case_and_expected,
    check,
    random_case,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", CASES | SEQUENCE_CASES)
def test_loss_gradient_and_metrics_are_those_of_plain_arithmetic(name):
    case, want = case_and_expected(name)
    exact = case.to(torch.float64)
    check(token_loss(exact.log_probs, exact.entropy, exact.tokens, exact.config, exact.kl), exact, want, FLOAT64)


@pytest.mark.parametrize("name", CASES | SEQUENCE_CASES)
def test_float32_is_as_close_as_float32_can_be(name):
    case, want = case_and_expected(name)
    result = token_loss(case.log_probs, case.entropy, case.tokens, case.config, case.kl)
    # autograd's derivative of k3 is a difference of numbers near 1
    check(result, case, want, FLOAT32, floor=1.0)
    assert result.loss_sum.dtype == result.grad_log_probs.dtype == torch.float32


def test_it_is_the_loss_with_its_gradient_and_needs_no_autograd_around_it():
    case = random_case(EVERYTHING)
    with torch.no_grad():
        ours = token_loss(case.log_probs, case.entropy, case.tokens, case.config, case.kl)
    leaves = case.log_probs.clone().requires_grad_(), case.entropy.clone().requires_grad_()
    result = dapo_loss(TokenOutputs(*leaves), case.tokens, case.config)
    result.loss_sum.backward()
    sum_names, max_names = metric_names(case.config)
    expected = (
        result.loss_sum,
        *(leaf.grad for leaf in leaves),
        stack_sums(result.sums, sum_names, "cpu"),
        stack_maxima(result.maxima, max_names, "cpu"),
    )
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(ours[:-1], expected, strict=True))
    assert ours.grad_kl is None


@pytest.mark.parametrize("name", ["everything", "the old policy is the current one"])
def test_metrics_hold_no_graph(name):
    case, _ = case_and_expected(name)
    outputs = TokenOutputs(case.log_probs.clone().requires_grad_(), case.entropy.clone().requires_grad_())
    result = dapo_loss(outputs, case.tokens, case.config)
    assert result.loss_sum.requires_grad
    shown = [*(x for pair in result.sums.values() for x in pair), *result.maxima.values()]
    assert not any(x.requires_grad for x in shown)
