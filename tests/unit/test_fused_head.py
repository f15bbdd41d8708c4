"""Refusals, checks and untouched cases of the training head.
Numbers: tests/distributed/test_head.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_dapo.algorithms.dapo_loss import LossConfig
from megatron_dapo.algorithms.policy_loss import OffPolicy
from megatron_dapo.kernels import fused_head as module
from megatron_dapo.kernels.fused_head import Head, fused_dapo_head
from megatron_dapo.kernels.row_plan import RowPlan
from megatron_dapo.kernels.self_check import Check, largest_errors
from tests.head_cases import Case, inputs_of, loss_of

pytestmark = pytest.mark.unit

CASE = Case(dtype=torch.float32, hidden=16)


def call(hidden=None, weight=None, loss=None, tokens=None, **options):
    inputs = inputs_of(CASE)
    hidden = inputs.hidden_LH.requires_grad_() if hidden is None else hidden
    weight = inputs.weight_VH.requires_grad_() if weight is None else weight
    fields = ("weights", "advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    tokens = replace(inputs.tokens, **{name: getattr(inputs.tokens, name).float() for name in fields})
    plan = RowPlan.make(inputs.counted, CASE.rows, CASE.chunk_size, torch.device("cpu"))
    head = Head(weight, None, CASE.num_valid, inputs.temperature)
    return fused_dapo_head(hidden, inputs.targets, plan, tokens, loss or loss_of(CASE), head, **options)


def test_a_loss_that_is_not_a_sum_over_tokens_is_refused():
    with pytest.raises(TypeError, match="whole sequences use linear_logprob_entropy"):
        call(loss=lambda log_probs: log_probs.sum())


def test_without_grad_mode_it_is_refused():
    with torch.no_grad(), pytest.raises(RuntimeError, match="use head_log_probs"):
        call()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_recompute_around_it_is_refused(reentrant):
    """It would add the weight's gradient twice."""
    hidden = inputs_of(CASE).hidden_LH.requires_grad_()
    with pytest.raises(RuntimeError, match="without grad mode|activation recompute"):
        checkpoint(lambda h: call(hidden=h).loss_sum, hidden, use_reentrant=reentrant).backward()


def test_a_loss_that_was_scaled_afterwards_is_refused():
    with pytest.raises(RuntimeError, match="loss_scale=1.0, but its loss was scaled differently"):
        (call().loss_sum * 2).backward()


def test_a_scale_that_was_announced_scales_every_gradient():
    def gradients(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = inputs_of(CASE)
        hidden, weight = inputs.hidden_LH.requires_grad_(), inputs.weight_VH.requires_grad_()
        (call(hidden, weight, loss_scale=scale).loss_sum * scale).backward()
        return hidden.grad, weight.grad

    for once, eightfold in zip(gradients(1.0), gradients(8.0), strict=True):
        assert torch.equal(eightfold, 8 * once)  # a power of two: no rounding


def test_gradients_can_be_taken_once():
    loss = call().loss_sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


def test_a_main_grad_of_too_few_digits_is_refused():
    weight = inputs_of(CASE).weight_VH.requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="main_grad is torch.bfloat16"):
        call(weight=weight)


def test_a_frozen_weight_gets_no_gradient_and_the_hidden_states_the_same():
    inputs = inputs_of(CASE)
    frozen, free = inputs.hidden_LH.clone().requires_grad_(), inputs.hidden_LH.clone().requires_grad_()
    weight = inputs.weight_VH
    call(frozen, weight).loss_sum.backward()
    call(free, weight.clone().requires_grad_()).loss_sum.backward()
    assert weight.grad is None and torch.equal(frozen.grad, free.grad)


def test_rows_that_do_not_count_are_never_read():
    inputs = inputs_of(CASE)
    poisoned = inputs.hidden_LH.clone()
    poisoned[np.setdiff1d(np.arange(CASE.rows), inputs.counted)] = float("nan")
    poisoned.requires_grad_()
    weight = inputs.weight_VH.requires_grad_()
    answer = call(poisoned, weight)
    answer.loss_sum.backward()
    assert answer.loss_sum.isfinite() and weight.grad.isfinite().all() and poisoned.grad.isfinite().all()
    assert torch.equal(answer.log_probs, call().log_probs)


def test_rows_of_padding_in_the_vocabulary_get_no_gradient():
    weight = inputs_of(CASE).weight_VH.requires_grad_()
    call(weight=weight).loss_sum.backward()
    assert weight.grad[CASE.num_valid :].abs().sum() == 0 < weight.grad[: CASE.num_valid].abs().sum()


CHECKS = {
    "float32": Check(torch.float32, 1000, loss_of(CASE), has_old_log_probs=True),
    "bfloat16": Check(torch.bfloat16, 1000, loss_of(CASE), has_old_log_probs=True),
    "one_step": Check(torch.float32, 1000, LossConfig(), has_old_log_probs=False),
    "replay": Check(
        torch.float32, 1000, LossConfig(off_policy=OffPolicy(), rollout_is_threshold=2.0), has_old_log_probs=True
    ),
    "weighed_before": Check(
        torch.float32,
        1000,
        LossConfig(bypass_mode=True, report_stale=True),
        has_old_log_probs=True,
        has_importance=True,
    ),
    "vocabulary": Check(torch.float32, 20_000, loss_of(CASE), has_old_log_probs=True),
    "full_kl": Check(torch.float32, 1000, loss_of(replace(CASE, full_kl=True)), has_old_log_probs=True, full_kl=True),
    "full_kl_in_reward": Check(torch.bfloat16, 1000, LossConfig(), has_old_log_probs=True, full_kl=True),
    "characters": Check(torch.float32, 64, loss_of(CASE), has_old_log_probs=True),
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_before_a_run_passes_here(name):
    errors = largest_errors(CHECKS[name], torch.device("cpu"))
    assert len(errors) == 9 + CHECKS[name].full_kl and all(e.error <= e.bound for e in errors), errors


@pytest.mark.parametrize("broken", ["statistics", "gradient", "nan"])
def test_the_check_before_a_run_detects_a_wrong_kernel(monkeypatch, broken):
    original = module.chunk_backend

    def wrong(*args):
        backend = original(*args)
        statistics, gradient = backend.statistics, backend.gradient
        if broken == "gradient":
            backend.gradient = lambda merged, g_lp, *rest: gradient(merged, g_lp * 1.001, *rest)
        else:
            factor = float("nan") if broken == "nan" else 1.001
            backend.statistics = lambda *arguments: statistics(*arguments) * torch.tensor([1, factor, 1, 1])
        return backend

    monkeypatch.setattr(module, "chunk_backend", wrong)
    assert not all(e.error <= e.bound for e in largest_errors(CHECKS["float32"], torch.device("cpu")))
