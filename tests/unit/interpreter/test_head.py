"""The heads on their Triton backend, products by torch: the numbers of float64 torch."""

import sys
from dataclasses import replace

import pytest
import torch

from megatron_dapo.kernels import Head, RowPlan, fused_dapo_head, head_log_probs, linear_logprob_entropy, tuning
from tests.head_cases import Case, bounds, inputs_of, loss_of, oracle

pytestmark = pytest.mark.unit

CASES = {
    "plain": Case(rows=24, dtype=torch.float32),
    "chunk_does_not_divide": Case(rows=20, mask="all", chunk_size=16, dtype=torch.float32),
    "no_entropy": Case(rows=24, entropy=False, dtype=torch.float32),
    "temperatures": Case(rows=24, temperature="per_token", dtype=torch.float32),
    "none_counted": Case(rows=24, mask="none", dtype=torch.float32),
    "offset_down": Case(rows=24, offset=-1000.0, dtype=torch.float32),
}


def case_parts(case: Case):
    given = inputs_of(case)
    hidden, weight = given.hidden_LH.requires_grad_(), given.weight_VH.requires_grad_()
    plan = RowPlan.make(given.counted, case.rows, case.chunk_size, torch.device("cpu"))
    head = Head(weight, None, case.num_valid, given.temperature, use_triton=True)
    names = ("weights", "advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    tokens = replace(given.tokens, **{name: getattr(given.tokens, name).float() for name in names})
    return given, hidden, weight, plan, head, tokens


@pytest.mark.parametrize("name", CASES)
def test_the_training_head_on_triton_is_float64_torch(monkeypatch, name):
    monkeypatch.setattr(sys.modules["megatron_dapo.kernels.token_loss"], "runs_on_triton", lambda tensor: True)
    case, expected = CASES[name], oracle(CASES[name])
    given, hidden, weight, plan, head, tokens = case_parts(case)
    answer = fused_dapo_head(hidden, given.targets, plan, tokens, loss_of(case), head)
    answer.loss_sum.backward()
    value_bound, hidden_bound, weight_bound = bounds(case)
    torch.testing.assert_close(answer.log_probs.double(), expected.log_probs, rtol=0, atol=value_bound)
    assert (answer.log_probs <= 0).all()
    if case.entropy:
        torch.testing.assert_close(answer.entropy.double(), expected.entropy, rtol=0, atol=4 * value_bound)
    for ours, theirs, bound in [
        (hidden.grad, expected.grad_hidden, hidden_bound),
        (weight.grad, expected.grad_weight, weight_bound),
    ]:
        assert (ours.double() - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("forward", ["gemm", "fused"])
def test_log_probs_alone_come_by_either_way_of_the_tuning_table(monkeypatch, forward):
    chosen = replace(tuning.default(), forward=forward)
    monkeypatch.setattr(tuning, "lookup", lambda *shape: chosen)
    # the fused kernel takes halves in rows of whole 16 bytes; a CPU has no product of halves with float32 results
    case = Case(rows=24, hidden=16, dtype=torch.bfloat16 if forward == "fused" else torch.float32)
    given, hidden, _, plan, head, _ = case_parts(case)
    log_probs, entropy = head_log_probs(hidden, given.targets, plan, head, want_entropy=True)
    expected, value_bound = oracle(case), bounds(case)[0]
    torch.testing.assert_close(log_probs.double(), expected.log_probs, rtol=0, atol=value_bound)
    torch.testing.assert_close(entropy.double(), expected.entropy, rtol=0, atol=4 * value_bound)


def test_the_composed_head_on_triton_is_the_one_on_torch():
    case = CASES["plain"]
    given = inputs_of(case)
    answers = []
    for use_triton in (True, False):
        hidden, weight = given.hidden_LH.clone().requires_grad_(), given.weight_VH.clone().requires_grad_()
        log_probs, entropy = linear_logprob_entropy(
            hidden[torch.from_numpy(given.counted)], weight, given.targets, temperature=given.temperature,
            num_valid_columns=case.num_valid, chunk_size=8, use_triton=use_triton,
        )  # fmt: skip
        (log_probs.sum() - 0.3 * entropy.sum()).backward()
        answers.append((log_probs.detach(), entropy.detach(), hidden.grad, weight.grad))
    value_bound = bounds(case)[0]
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=4 * value_bound * theirs.abs().max().item())
