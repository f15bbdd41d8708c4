"""Promises of the loss kernel, in Triton's interpreter: it computes the torch backend's results."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from megatron_dapo.algorithms.dapo_loss import LossConfig, metric_names
from megatron_dapo.kernels.self_check import Check, largest_errors
from megatron_dapo.kernels.token_loss import token_loss as token_loss_by_device
from megatron_dapo.kernels.triton_ops.loss_kernel import BLOCK, REDUCE_ROWS, token_loss
from tests.token_loss_oracle import (
    CASES,
    EVERYTHING,
    FLOAT32,
    FLOAT64,
    by_hand,
    case_and_expected,
    check,
    declaring,
    expected,
    random_case,
)

pytestmark = pytest.mark.unit


def in_triton(case):
    return token_loss(case.log_probs, case.entropy, case.tokens, case.config, case.kl)


def equal_bits(a, b):
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def in_torch(case):
    """In float64, of the same float32 numbers."""
    exact = case.to(torch.float64)
    return token_loss_by_device(exact.log_probs, exact.entropy, exact.tokens, exact.config, exact.kl)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_torch_backend_and_plain_arithmetic(name):
    case, want = case_and_expected(name)
    ours, reference = in_triton(case), in_torch(case)
    check(ours, case, want, FLOAT32)
    for a, b in zip(ours, reference, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            scale = b.abs().max() if b.numel() else 1.0
            torch.testing.assert_close(a.double(), b.double(), rtol=FLOAT32, atol=float(FLOAT32 * scale))


@pytest.mark.parametrize("n", [BLOCK - 1, BLOCK, BLOCK + 1, BLOCK * REDUCE_ROWS + 1])
def test_any_number_of_tokens_around_and_beyond_the_blocks(n):
    case = random_case(EVERYTHING, n=n, seed=n)
    check(in_triton(case), case, expected(case), FLOAT32)


def test_two_runs_give_equal_bits_and_float32():
    case = random_case(EVERYTHING, n=3 * BLOCK)
    a, b = in_triton(case), in_triton(case)
    assert equal_bits(a, b)
    assert (
        a.loss_sum.shape == () and a.loss_sum.dtype == a.grad_log_probs.dtype == a.grad_entropy.dtype == torch.float32
    )


@pytest.mark.parametrize("difference", [1e-7, -1e-5, 1e-3, 0.1, 0.4999, -0.4999, 0.5001, 1.0])
def test_k3_of_small_differences_keeps_the_digits_of_float32(difference):
    case = by_hand(EVERYTHING, [(1.0, 0.0, 0.0, 0.0, 0.0)])
    x = torch.tensor([difference], dtype=torch.float32)
    zero = torch.zeros(1)  # so that the difference is exact
    tokens = replace(case.tokens, old_log_probs=zero, ref_log_probs=x, rollout_log_probs=-x)
    result = in_triton(replace(case, log_probs=zero, tokens=tokens))
    rows = dict(zip(metric_names(case.config)[0], result.sums.tolist(), strict=True))
    k3 = math.expm1(float(x)) - float(x)
    # below 1/2 a series: seven roundings at most; above a difference of numbers up to e:
    # their roundings
    bound = 7 * 2.0**-24 * k3 if abs(difference) < 0.5 else 3 * math.e * 2.0**-24
    assert abs(rows["actor/rollout_k3"][0] - k3) <= bound
    assert abs(rows["actor/kl_loss"][0] - k3) <= bound


@pytest.mark.parametrize("field", ["log_probs", "advantages", "old_log_probs", "rollout_log_probs", "entropy"])
@pytest.mark.parametrize("place", [0, BLOCK + 3])
def test_a_nan_that_counts_is_not_hidden(field, place):
    case = by_hand(EVERYTHING, [(-1.0, 0.1, 0.2, 0.3, 0.0)] * (2 * BLOCK))
    values = getattr(case if field in ("log_probs", "entropy") else case.tokens, field).clone()
    values[place] = math.nan
    if field in ("log_probs", "entropy"):
        case = replace(case, **{field: values})
    else:
        case = replace(case, tokens=replace(case.tokens, **{field: values}))
    ours, reference = in_triton(case), in_torch(case)
    assert ours.loss_sum.isnan()
    assert torch.equal(ours.sums.isnan(), reference.sums.isnan())
    assert torch.equal(ours.maxima.isnan(), reference.maxima.isnan())


def test_tensors_may_be_strided_and_masks_of_any_type():
    case, want = case_and_expected("everything")
    pairs = torch.stack([case.log_probs, case.entropy], dim=-1)
    tokens = replace(
        case.tokens,
        exp_mask=case.tokens.exp_mask.float(),
        is_current=case.tokens.is_current.int(),
        count=case.tokens.count.int(),
    )
    check(token_loss(pairs[:, 0], pairs[:, 1], tokens, case.config), case, want, FLOAT32)


def test_a_gpu_computes_in_float32_and_leaves_float64_to_torch(monkeypatch):
    # the package exports the function of that name
    module = sys.modules["megatron_dapo.kernels.token_loss"]
    monkeypatch.setattr(module, "runs_on_triton", lambda tensor: tensor.dtype != torch.float64)
    case, want = case_and_expected("everything")
    single, exact = (
        module.token_loss(c.log_probs, c.entropy, c.tokens, c.config) for c in (case, case.to(torch.float64))
    )
    assert equal_bits(single, in_triton(case))
    check(exact, case, want, FLOAT64)


def test_what_the_loss_does_not_read_is_not_asked_for():
    case = random_case(LossConfig(report_mismatch=False), n=20)
    bare = replace(case.tokens, ref_log_probs=None, rollout_log_probs=None, is_current=None, exp_mask=None)
    a, b = in_triton(case), token_loss(case.log_probs, None, bare, case.config)
    assert equal_bits(a, b)


@pytest.mark.parametrize("kind", ["sums", "maxima"])
def test_the_check_before_a_run_sees_a_declared_metric_that_the_kernel_does_not_store(monkeypatch, kind):
    monkeypatch.setattr(
        sys.modules["megatron_dapo.kernels.token_loss"], "runs_on_triton", lambda tensor: tensor.dtype != torch.float64
    )

    def wrong_values():
        errors = largest_errors(Check(torch.float32, 64, EVERYTHING, has_old_log_probs=True), torch.device("cpu"))
        return {error.name for error in errors if not error.error <= error.bound}

    assert not wrong_values()
    with declaring(lambda result: result._replace(**{kind: _with_one_more(getattr(result, kind))})):
        assert wrong_values() == {{"sums": "counts of metrics", "maxima": "largest of metrics"}[kind]}


def _with_one_more(metrics):
    return {**metrics, "actor/undreamt": next(iter(metrics.values()))}
