"""SAPO's gate and DPPO's masks: their papers' formulas, and tokens worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss
from megatron_dapo.algorithms.metrics import finalize
from megatron_dapo.algorithms.policy_loss import Clip
from tests.unit.test_policy_losses import MODES, Responses, tensor

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(2))
def test_sapo_is_the_formula_of_its_paper(mode, seed):
    """arXiv 2511.20347: 4 / tau * sigmoid(tau (r - 1)) A, a mean of responses' means."""
    responses = Responses(seed, spread=0.8)
    ours, shown = responses.loss_of(mode, Clip(tau_pos=0.7, tau_neg=1.3), "sapo")
    tau = torch.where(responses.advantages > 0, tensor(0.7), tensor(1.3))
    ratio = (responses.log_probs - responses.old).exp()
    losses = -4 / tau * torch.special.expit(tau * (ratio - 1)) * responses.advantages
    responses.assert_same(ours, responses.mean(losses, mode), 1e-10)  # autograd's 1 - sigmoid of large ratios
    assert shown["actor/on_pg_clipfrac"] == shown["actor/on_pg_clipfrac_lower"] == shown["actor/dual_clipfrac"] == 0.0


@pytest.mark.parametrize("ratio", [1.0, 0.1, 0.9, 1.5, 4.0, 20.0])
@pytest.mark.parametrize("advantage, tau", [(2.0, 0.8), (-1.0, 1.3)])
def test_the_gate_weighs_a_token_by_the_square_of_the_hyperbolic_secant(ratio, advantage, tau):
    """The paper's w = sech^2(tau / 2 (r - 1)): 1 for a ratio of 1, and less on both sides."""
    _, gradient, _ = of_token("sapo", advantage, 0.01 * ratio, 0.01, Clip(tau_pos=0.8, tau_neg=1.3))
    weight = 1 / math.cosh(tau / 2 * (ratio - 1)) ** 2
    assert gradient == pytest.approx(-advantage * ratio * weight, rel=1e-9)


@pytest.mark.parametrize("dtype, ratio", [(torch.float32, 30.0), (torch.float64, 60.0)])
def test_the_gate_of_a_large_ratio_keeps_its_digits(dtype, ratio):
    """1 - sigmoid, as a difference, would be 0."""
    log_prob = torch.tensor(math.log(ratio), dtype=dtype).requires_grad_()
    one = torch.ones((), dtype=dtype)
    batch = TokenBatch(one, torch.tensor(1), one, torch.zeros_like(one))
    dapo_loss(TokenOutputs(log_prob), batch, LossConfig(policy_loss="sapo", report_mismatch=False)).loss_sum.backward()
    exact = -4 * ratio * math.exp(-(ratio - 1))  # sech^2 this far out
    assert log_prob.grad.item() == pytest.approx(exact, rel=1e-4)


# advantage, chance, old chance -> masked by total variation above 0.15, by KL above 0.05
MASKED = {
    "likelier, good, far": (1.0, 0.7, 0.5, True, True),
    "likelier, good, near": (2.0, 0.6, 0.5, False, False),
    "likelier, bad, far: it comes back": (-1.0, 0.7, 0.5, False, False),
    "less likely, bad, far, though its ratio is 0.81": (-1.0, 0.8, 0.99, True, True),
    "less likely, good, far: it comes back": (1.0, 0.8, 0.99, False, False),
    "rare, a hundred times likelier": (1.0, 1e-3, 1e-5, False, False),
    "small in total variation, large in KL": (1.0, 0.1, 1e-3, False, True),
    "no advantage": (0.0, 0.7, 0.5, False, False),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("kind, place", [("dppo_tv", 0), ("dppo_kl", 1)])
def test_a_token_far_from_the_old_policy_is_masked_unless_it_comes_back(name, kind, place):
    advantage, chance, old_chance, *masked = MASKED[name]
    clip = Clip(divergence=(0.15, 0.05)[place])
    loss, gradient, shown = of_token(kind, advantage, chance, old_chance, clip)
    expected = 0.0 if masked[place] else -advantage * chance / old_chance
    assert (loss, gradient) == pytest.approx((expected, expected))
    cut = (masked[place] and advantage > 0, masked[place] and advantage < 0)
    assert (shown["actor/on_pg_clipfrac"], shown["actor/on_pg_clipfrac_lower"]) == cut
    assert shown["actor/dual_clipfrac"] == 0


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("seed", range(2))
def test_dppo_is_the_formula_of_its_paper(kind, seed):
    """arXiv 2602.04879, binary forms, with torch's KL of the two choices, token and any other."""
    responses, threshold = Responses(seed, spread=0.3), 0.02
    responses.old = responses.old.clamp(max=-1e-3)
    ours, _ = responses.loss_of("token-mean", Clip(divergence=threshold), kind)
    ratio = (responses.log_probs - responses.old).exp()
    new, old = (torch.stack([x.exp(), -x.expm1()]) for x in (responses.log_probs.detach(), responses.old))
    kl = torch.nn.functional.kl_div(new.log(), old, reduction="none").sum(0)
    divergence = (new - old).abs().sum(0) / 2 if kind == "dppo_tv" else kl
    leaves = (responses.advantages > 0) & (ratio > 1) | (responses.advantages < 0) & (ratio < 1)
    mask = ~(leaves & (divergence > threshold))
    assert 0 < (mask & (responses.mask != 0)).sum() < responses.mask.sum()
    responses.assert_same(ours, responses.mean(-(mask * ratio * responses.advantages), "token-mean"))


def of_token(kind: str, advantage: float, chance: float, old_chance: float, clip: Clip) -> tuple[float, float, dict]:
    """Loss, gradient by the log-prob and metrics of one token."""
    log_prob: Tensor = tensor(math.log(chance)).requires_grad_()
    batch = TokenBatch(tensor(1.0), torch.tensor(1), tensor(advantage), tensor(math.log(old_chance)))
    config = LossConfig(clip=clip, policy_loss=kind, report_mismatch=False)
    result = dapo_loss(TokenOutputs(log_prob), batch, config)
    result.loss_sum.backward()
    return result.loss_sum.item(), log_prob.grad.item(), finalize(result.sums)
