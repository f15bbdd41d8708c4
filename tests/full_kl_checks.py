"""Promises of the KL over the whole vocabulary: small on the CPU,
at real sizes on a GPU (tests/gpu)."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron_dapo.algorithms.dapo_loss import LossConfig
from megatron_dapo.kernels.full_kl import linear_full_kl
from megatron_dapo.kernels.fused_head import KLReference, fused_dapo_head, head_full_kl
from tests.kernel_checks import BOUNDS, HeadCase, forbidding_host_syncs

LOSS = LossConfig(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="full", report_mismatch=False)


def check_full_kl(case: HeadCase) -> None:
    """KL and gradients of the KL by itself (advantages are 0) against the chunked float64 head,
    which unit tests compare with torch's kl_div. The same bits twice; exactly 0 to itself; nothing
    waits for the device."""
    hidden, weight, rows = case.hidden_LH, case.weight_VH, torch.from_numpy(case.counted_rows).to(case.device)
    g = torch.Generator(case.device).manual_seed(5)

    def near(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=g, device=case.device)
        return x.detach() + (0.3 * x.detach().float().std() * noise).to(x.dtype)

    its_hidden, its_weight = near(hidden), near(weight)
    plan, head = case.plan(), case.head()
    reference = KLReference(plan.kept_rows(its_hidden), its_weight)
    tokens = replace(case.tokens, advantages=torch.zeros_like(case.tokens.advantages))

    def once() -> list[Tensor]:
        hidden.grad, weight.grad = None, None
        weight.main_grad.zero_()
        answer = fused_dapo_head(hidden, case.targets, plan, tokens, LOSS, head, reference=reference)
        answer.loss_sum.backward()
        scored = head_full_kl(hidden, case.targets, plan, head, reference)
        return [t.detach().clone() for t in (*scored, answer.log_probs, hidden.grad, weight.main_grad)]

    with forbidding_host_syncs(case.device):
        answers, again = once(), once()
    assert all(torch.equal(a, b) for a, b in zip(answers, again, strict=True)), "two runs differ"
    log_probs, kl, trained, grad_hidden, grad_weight = answers
    assert torch.equal(log_probs, trained), "not the bits of the training pass"
    itself = KLReference(plan.kept_rows(hidden.detach()), weight.detach())
    assert not head_full_kl(hidden, case.targets, plan, head, itself)[1].any(), "a model differs from itself"

    exact = [x.detach().double().requires_grad_() for x in (hidden[rows], weight)]
    settings = {"num_valid_columns": case.num_valid, "chunk_size": 512, "use_triton": False}
    others = its_hidden[rows].double(), its_weight.double()
    expected = linear_full_kl(*exact, *others, temperature=case.temperature.double(), **settings)
    (LOSS.kl_loss_coef * case.tokens.weights * expected).sum().backward()
    bounds = BOUNDS[weight.dtype]
    # a sum of differences of two log-probs
    torch.testing.assert_close(kl.double(), expected.detach(), rtol=2 * bounds.log_prob, atol=2 * bounds.log_prob)
    pairs = ((grad_hidden[rows], exact[0].grad, bounds.grad_hidden), (grad_weight, exact[1].grad, bounds.grad_weight))
    for grad, exact_grad, bound in pairs:
        error = ((grad.double() - exact_grad).norm() / exact_grad.norm()).item()
        assert error <= bound, f"a gradient is off by {error:.1e} of its norm"
