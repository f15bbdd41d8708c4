"""The log-prob head against float64 log_softmax: values, gradients, odd shapes, extreme offsets."""

import pytest
import torch

from megatron_dapo.kernels.linear_logprob import linear_logprob_entropy

pytestmark = pytest.mark.unit


def oracle(hidden, weight, targets, temperature, num_valid):
    """float64 log_softmax over the valid columns, and its entropy."""
    logits = (hidden @ weight[:num_valid].T) / temperature
    log_p = torch.log_softmax(logits, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def case(n=37, h=19, v=53, dtype=torch.float64, offset=0.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=g, dtype=torch.float64)
    weight = torch.randn(v, h, generator=g, dtype=torch.float64)
    hidden[:, 0], weight[:, 0] = 1.0, offset
    targets = torch.randint(0, v - 3, (n,), generator=g)
    return hidden.to(dtype), weight.to(dtype), targets


@pytest.mark.parametrize("chunk_size", [1, 8, 37, 1000])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_values_and_gradients_equal_float64_log_softmax(chunk_size, temperature):
    hidden, weight, targets = case()
    inputs = [t.clone().requires_grad_() for t in (hidden, weight)]
    oracle_inputs = [t.clone().requires_grad_() for t in (hidden, weight)]
    lp, h = linear_logprob_entropy(
        *inputs, targets, temperature=temperature, want_entropy=True, num_valid_columns=50, chunk_size=chunk_size
    )
    lp_ref, h_ref = oracle(*oracle_inputs, targets, temperature, 50)
    g1, g2 = torch.randn(2, len(targets), dtype=torch.float64)
    (lp @ g1 + h @ g2).backward()
    (lp_ref @ g1 + h_ref @ g2).backward()
    for a, b in [(lp, lp_ref), (h, h_ref), *((x.grad, y.grad) for x, y in zip(inputs, oracle_inputs, strict=True))]:
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("offset", [-1000.0, -120.0, 0.0, 1000.0])
def test_a_common_offset_of_the_logits_changes_nothing_but_its_own_rounding(offset):
    hidden, weight, targets = case(dtype=torch.float32, offset=offset)
    lp, h = linear_logprob_entropy(hidden, weight, targets, want_entropy=True)
    lp_ref, h_ref = oracle(hidden.double(), weight.double(), targets, 1.0, len(weight))
    # one fp32 rounding of a logit of this size enters x_t - M and each x - M
    bound = 4 * torch.finfo(torch.float32).eps * (abs(offset) + 50)
    torch.testing.assert_close(lp.double(), lp_ref, rtol=0, atol=bound)
    torch.testing.assert_close(h.double(), h_ref, rtol=0, atol=bound * 4)


def test_log_probs_are_never_above_zero_even_for_a_certain_token():
    hidden, weight = torch.eye(4) * 80, torch.eye(4) * 80
    lp, h = linear_logprob_entropy(hidden, weight, torch.arange(4), want_entropy=True)
    assert (lp <= 0).all() and (lp > -1e-6).all()
    assert h.isfinite().all() and h.abs().max() < 1e-6


def test_no_rows_give_empty_results_and_zero_gradients():
    hidden, weight, targets = case(n=0)
    weight.requires_grad_()
    lp, h = linear_logprob_entropy(hidden.requires_grad_(), weight, targets, want_entropy=True)
    (lp.sum() + h.sum()).backward()
    assert lp.shape == h.shape == (0,)
    assert weight.grad.abs().sum() == 0 and hidden.grad.shape == hidden.shape


def test_entropy_gradient_is_that_of_finite_differences():
    hidden, weight, targets = case(n=5, h=4, v=9)
    hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: linear_logprob_entropy(a, b, targets, temperature=0.8, want_entropy=True, chunk_size=2),
        (hidden, weight),
    )
