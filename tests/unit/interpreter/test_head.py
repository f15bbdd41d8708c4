"""The heads on their Triton backend, products by torch: the numbers of float64 torch."""

import sys
from dataclasses import replace

import pytest
import torch

from megatron_dapo.kernels.fused_head import Head, KLReference, fused_dapo_head, head_full_kl, head_log_probs
from megatron_dapo.kernels.linear_logprob import linear_logprob_entropy
from megatron_dapo.kernels.row_plan import RowPlan
from tests.head_cases import Case, bounds, inputs_of, loss_of, oracle

pytestmark = pytest.mark.unit

CASES = {
    "plain": Case(rows=24, dtype=torch.float32),
    "chunk_does_not_divide": Case(rows=20, mask="all", chunk_size=16, dtype=torch.float32),
    "no_entropy": Case(rows=24, entropy=False, dtype=torch.float32),
    "temperatures": Case(rows=24, temperature="per_token", dtype=torch.float32),
    "none_counted": Case(rows=24, mask="none", dtype=torch.float32),
    "offset_down": Case(rows=24, offset=-1000.0, dtype=torch.float32),
    "bfloat16": Case(rows=24, hidden=32, dtype=torch.bfloat16),
    "full_kl": Case(rows=24, full_kl=True, temperature="per_token", dtype=torch.float32),
    "full_kl_bfloat16": Case(rows=20, full_kl=True, entropy=False, hidden=32, mask="all", dtype=torch.bfloat16),
    "bfloat16_chunks": Case(rows=20, hidden=32, mask="all", chunk_size=16, dtype=torch.bfloat16),
}
# The interpreter stores bf16 by cutting off digits, not by rounding: gradients of logits are off by
# up to twice as much
TRUNCATION = 2


def case_parts(case: Case):
    inputs = inputs_of(case)
    hidden, weight = inputs.hidden_LH.requires_grad_(), inputs.weight_VH.requires_grad_()
    plan = RowPlan.make(inputs.counted, case.rows, case.chunk_size, torch.device("cpu"))
    head = Head(weight, None, case.num_valid, inputs.temperature, use_triton=True)
    names = ("weights", "advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    tokens = replace(inputs.tokens, **{name: getattr(inputs.tokens, name).float() for name in names})
    return inputs, hidden, weight, plan, head, tokens


@pytest.mark.parametrize("name", CASES)
def test_the_training_head_on_triton_is_float64_torch(monkeypatch, name):
    monkeypatch.setattr(sys.modules["megatron_dapo.kernels.token_loss"], "runs_on_triton", lambda tensor: True)
    case, expected = CASES[name], oracle(CASES[name])
    inputs, hidden, weight, plan, head, tokens = case_parts(case)
    reference = KLReference(plan.kept_rows(inputs.ref_hidden_LH), inputs.ref_weight_VH) if case.full_kl else None
    answer = fused_dapo_head(hidden, inputs.targets, plan, tokens, loss_of(case), head, reference=reference)
    answer.loss_sum.backward()
    value_bound, hidden_bound, weight_bound = bounds(case)
    torch.testing.assert_close(answer.log_probs.double(), expected.log_probs, rtol=0, atol=value_bound)
    assert (answer.log_probs <= 0).all()
    if case.entropy:
        torch.testing.assert_close(answer.entropy.double(), expected.entropy, rtol=0, atol=4 * value_bound)
    if case.full_kl:
        log_probs, kl = head_full_kl(hidden, inputs.targets, plan, head, reference)
        assert torch.equal(log_probs, answer.log_probs)
        torch.testing.assert_close(kl.double(), expected.kl, rtol=4 * value_bound, atol=4 * value_bound)
    for grad, exact_grad, bound in [
        (hidden.grad, expected.grad_hidden, hidden_bound),
        (weight.grad, expected.grad_weight, weight_bound),
    ]:
        assert (grad.double() - exact_grad).norm() <= TRUNCATION * bound * exact_grad.norm()


def test_log_probs_without_a_loss_equal_float64():
    case = Case(rows=24, hidden=16, dtype=torch.bfloat16)
    inputs, hidden, _, plan, head, _ = case_parts(case)
    log_probs, entropy = head_log_probs(hidden, inputs.targets, plan, head, want_entropy=True)
    expected, value_bound = oracle(case), bounds(case)[0]
    torch.testing.assert_close(log_probs.double(), expected.log_probs, rtol=0, atol=value_bound)
    torch.testing.assert_close(entropy.double(), expected.entropy, rtol=0, atol=4 * value_bound)


def test_old_log_probs_have_the_training_passs_bits():
    """The ratio of the first optimizer step is exactly 1."""
    case = Case(rows=24, hidden=16, dtype=torch.bfloat16)
    inputs, hidden, _, plan, head, tokens = case_parts(case)
    old, _ = head_log_probs(hidden, inputs.targets, plan, head)
    assert torch.equal(old, fused_dapo_head(hidden, inputs.targets, plan, tokens, loss_of(case), head).log_probs)


def test_the_composed_head_on_triton_is_the_one_on_torch():
    case = CASES["plain"]
    inputs = inputs_of(case)
    answers = []
    for use_triton in (True, False):
        hidden, weight = inputs.hidden_LH.clone().requires_grad_(), inputs.weight_VH.clone().requires_grad_()
        log_probs, entropy = linear_logprob_entropy(
            hidden[torch.from_numpy(inputs.counted)], weight, inputs.targets, temperature=inputs.temperature,
            num_valid_columns=case.num_valid, chunk_size=8, use_triton=use_triton,
        )  # fmt: skip
        (log_probs.sum() - 0.3 * entropy.sum()).backward()
        answers.append((log_probs.detach(), entropy.detach(), hidden.grad, weight.grad))
    value_bound = bounds(case)[0]
    for actual, expected in zip(*answers, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=4 * value_bound * expected.abs().max().item())
