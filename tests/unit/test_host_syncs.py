"""Nothing in the loss path needs a value on the host: it runs on tensors without values.

On the `meta` device a tensor has a shape and no contents, so `.item()`, `.tolist()`, `.cpu()`,
`nonzero` and every shape that depends on values raise. For waits of whole optimizer steps see
tests/unit/test_training_checks.py.
"""

from dataclasses import fields, replace

import pytest
import torch

from megatron_dapo.algorithms.aggregation import token_weights
from megatron_dapo.kernels.fused_head import Head, KLReference, fused_dapo_head, head_full_kl, head_log_probs
from megatron_dapo.kernels.linear_logprob import linear_logprob_entropy
from megatron_dapo.kernels.row_plan import RowPlan
from tests.head_cases import Case, inputs_of, loss_of

pytestmark = pytest.mark.unit

META = torch.device("meta")
CASES = {
    "plain": Case(dtype=torch.float32),
    "no_entropy": Case(dtype=torch.float32, entropy=False),
    "temperatures": Case(dtype=torch.float32, temperature="per_token"),
    "none_counted": Case(dtype=torch.float32, mask="none"),
    "full_kl": Case(dtype=torch.float32, full_kl=True),
}


def on_meta(case: Case):
    inputs = inputs_of(case)
    hidden, weight = (t.to(META).requires_grad_() for t in (inputs.hidden_LH, inputs.weight_VH))
    values = {field.name: getattr(inputs.tokens, field.name) for field in fields(inputs.tokens)}
    tokens = replace(inputs.tokens, **{k: v.to(META) for k, v in values.items() if isinstance(v, torch.Tensor)})
    temperature = inputs.temperature
    temperature = temperature.to(META) if isinstance(temperature, torch.Tensor) else temperature
    return inputs, hidden, weight, tokens, temperature


@pytest.mark.parametrize("name", CASES)
def test_the_heads_need_no_value_on_the_host(name):
    case = CASES[name]
    inputs, hidden, weight, tokens, temperature = on_meta(case)
    targets = inputs.targets.to(META)
    plan = RowPlan.make(inputs.counted, case.rows, case.chunk_size, META)
    head = Head(weight, None, case.num_valid, temperature)
    log_probs, _ = head_log_probs(hidden, targets, plan, head, want_entropy=case.entropy)
    reference = KLReference(plan.kept_rows(inputs.ref_hidden_LH.to(META)), inputs.ref_weight_VH.to(META))
    head_full_kl(hidden, targets, plan, head, reference)
    answer = fused_dapo_head(hidden, targets, plan, tokens, loss_of(case), head, reference=reference)
    answer.loss_sum.backward()
    assert log_probs.shape == answer.log_probs.shape == (len(inputs.counted),)
    assert hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape


def test_the_composed_head_needs_none_either():
    inputs, hidden, weight, _, _ = on_meta(CASES["plain"])
    log_probs, entropy = linear_logprob_entropy(
        hidden, weight, torch.zeros(len(hidden), dtype=torch.int64, device=META)
    )
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == hidden.shape


def test_the_weights_of_tokens_need_none():
    mask, segments = torch.ones(1, 12, device=META), torch.zeros(1, 12, dtype=torch.int64, device=META)
    weights, count = token_weights("seq-mean-token-mean", mask, segments, 3, 8)
    assert weights.shape == (1, 12) and count.shape == ()


@pytest.mark.parametrize("reading", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero])
def test_a_reading_would_be_noticed(reading):
    with pytest.raises((RuntimeError, NotImplementedError)):
        reading(torch.zeros((), device=META))
