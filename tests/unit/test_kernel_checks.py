"""The GPU tests' demands on the kernels, on the CPU at small sizes: the checks themselves work."""

from dataclasses import replace

import pytest
import torch

from tests import kernel_checks as checks
from tests.full_kl_checks import check_full_kl

pytestmark = pytest.mark.unit

SHAPES = {
    "odd": dict(rows=53, hidden=24, vocab=91, padding=5, chunk_size=16),
    "one_chunk": dict(rows=20, hidden=64, vocab=300, chunk_size=64),
}
CHECKS = (
    checks.check_values,
    checks.check_composed_gradients,
    checks.check_fused_head,
    checks.check_fused_is_composed,
    checks.check_run_to_run,
    checks.check_batch_invariance,
    checks.check_no_host_sync,
    checks.check_token_loss,
    check_full_kl,
)


def case_of(shape: str, dtype=torch.float32) -> checks.HeadCase:
    return checks.HeadCase.make(torch.device("cpu"), **SHAPES[shape], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("check", CHECKS)
def test_the_cpu_keeps_the_promises_of_a_gpu(check, shape, dtype):
    check(case_of(shape, dtype))


@pytest.mark.parametrize("rows", [1000, 2000])
def test_memory_is_one_chunk_however_many_rows(rows, monkeypatch):
    shape = dict(rows=rows, hidden=16, vocab=1000, chunk_size=256, dtype=torch.float32)
    case = checks.HeadCase.make(torch.device("cpu"), **shape)
    checks.check_memory(case)
    in_one = replace(case, chunk_size=rows).plan()
    monkeypatch.setattr(checks.HeadCase, "plan", lambda self: in_one)
    with pytest.raises(AssertionError, match="at the peak"):
        checks.check_memory(case)


@pytest.mark.parametrize(
    ("check", "field"),
    [
        (checks.check_values, "log_prob"),
        (checks.check_values, "entropy"),
        (checks.check_composed_gradients, "grad_hidden"),
        (checks.check_composed_gradients, "grad_weight"),
        (checks.check_fused_head, "log_prob"),
        (checks.check_fused_head, "grad_hidden"),
        (checks.check_fused_head, "grad_weight"),
    ],
)
def test_a_difference_would_be_noticed(check, field, monkeypatch):
    case, right = case_of("odd", torch.bfloat16), checks.oracle

    def spoiled(*arguments):
        answer = right(*arguments)
        value = getattr(answer, field)
        return answer if value is None else answer._replace(**{field: value * 1.01})

    monkeypatch.setattr(checks, "oracle", spoiled)
    with pytest.raises(AssertionError, match="off by|entropy"):
        check(case)


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
def test_a_mask_that_masks_no_token_would_be_noticed(kind):
    loss = replace(checks.MASKING, policy_loss=kind)
    checks.check_token_loss(case_of("odd"), loss)
    with pytest.raises(AssertionError, match="no token is masked on a side"):
        checks.check_token_loss(case_of("odd"), replace(loss, clip=replace(loss.clip, divergence=0.999)))


def test_a_row_that_depends_on_its_company_would_be_noticed(monkeypatch):
    right = checks.head_log_probs

    def spoiled(*arguments, **options):
        log_prob, entropy = right(*arguments, **options)
        return log_prob * (1 + 1e-6 * len(log_prob)), entropy

    monkeypatch.setattr(checks, "head_log_probs", spoiled)
    with pytest.raises(AssertionError, match="rows"):
        checks.check_batch_invariance(case_of("odd"))


@pytest.mark.parametrize(
    "read",
    [torch.Tensor.item, torch.nonzero, lambda x: x[x > 0], lambda x: x.masked_select(x > 0), bool, torch.unique],
)
def test_reading_a_value_would_be_noticed(read):
    with checks.forbidding_host_syncs(torch.device("cpu")), pytest.raises(RuntimeError, match="on the host"):
        read(torch.ones(1))
