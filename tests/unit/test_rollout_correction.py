"""Importance weights and rejection: formulas and count, the same for every cut of a batch."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss
from megatron_dapo.algorithms.metrics import finalize
from megatron_dapo.algorithms.rollout_correction import RatioBounds, RolloutCorrection, token_importance
from megatron_dapo.data.batching import assemble
from megatron_dapo.data.packing import collate
from megatron_dapo.training.policy import corrected
from tests.kernel_checks import CountedReads
from tests.rollout_correction_oracle import CASES, check, config, random_case
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", CASES)
def test_weights_and_metrics_are_those_of_plain_arithmetic(name):
    case = CASES[name]()
    check(case.corrected(), case)


TELLING = (
    "truncated",
    "truncated, of sequences",
    "icepop",
    "icepop, of sequences",
    "tokens rejected",
    "sequences rejected by their geometric mean",
    "sequences rejected by k3",
    "veto",
    "everything",
    "tiny differences",
)


@pytest.mark.parametrize("name", TELLING)
def test_a_case_has_both_kinds_of_tokens(name):
    """One in which nothing is out of bounds, or everything, would tell nothing."""
    metrics = finalize(CASES[name]().corrected().sums)
    for metric in ("actor/rollout_is_truncated", "actor/rollout_rs_token_masked"):
        assert 0 < metrics.get(metric, 0.5) < 1


@pytest.mark.parametrize("name", ["everything", "truncated, of sequences", "sequences rejected by k3"])
def test_it_does_not_matter_with_which_others_a_sequence_lies_together(name):
    case = CASES[name]()
    whole = case.corrected()
    parts = []
    for segment in range(case.num_segments):
        is_member = case.segments == segment
        cut = (x[is_member][None] for x in (case.old, case.rollout, case.mask))
        parts.append(
            replace(
                case,
                **dict(zip(("old", "rollout", "mask"), cut, strict=True)),
                segments=torch.zeros(1, int(is_member.sum()), dtype=torch.int64),
                num_segments=1,
            ).corrected()
        )
    assert torch.equal(torch.cat([part.importance for part in parts], dim=1), whole.importance)
    for metric, pair in whole.sums.items():
        for place in (0, 1):
            assert sum(float(part.sums[metric][place]) for part in parts) == pytest.approx(float(pair[place]))


def test_what_the_loss_weighs_by_itself_is_what_the_step_would_have_computed():
    case = random_case(config(rollout_is="token", rollout_is_bounds=(0.8, 1.5)), seed=3)
    step = case.corrected()
    weights, sums = token_importance(case.old, case.rollout, case.mask != 0, RatioBounds(0.8, 1.5))
    assert torch.equal(weights, step.importance)
    assert finalize(sums) == finalize(step.sums)


def test_float32_log_probs_give_float32_weights():
    case = CASES["everything"]()
    single = replace(case, old=case.old.float(), rollout=case.rollout.float())
    weights = single.corrected().importance
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), case.corrected().importance, rtol=1e-5, atol=1e-5)


def loss_of(importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float], torch.Tensor]:
    """(sum, gradient, metrics, count) of four tokens, with a KL and an entropy bonus."""
    log_probs = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(4, dtype=torch.float64)
    batch = TokenBatch(
        ones,
        torch.tensor(4),
        torch.tensor([1.0, -1.0, 2.0, 0.5], dtype=torch.float64),
        log_probs.detach() - 0.1,
        ref_log_probs=log_probs.detach() - 0.3,
        rollout_log_probs=log_probs.detach() - 0.2,
        importance=importance,
    )
    terms = LossConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="mse", entropy_coef=0.2, report_entropy=True)
    result = dapo_loss(TokenOutputs(log_probs, 0.7 * ones), batch, terms)
    result.loss_sum.backward()
    return result.loss_sum.item(), log_probs.grad, finalize(result.sums), batch.count


def test_rejecting_everything_leaves_kl_and_entropy_and_the_count():
    loss, gradient, shown, count = loss_of(torch.zeros(4, dtype=torch.float64))
    assert count == 4 and shown["actor/pg_loss"] == 0.0
    assert loss == pytest.approx(4 * (0.1 * 0.3**2 / 2 - 0.2 * 0.7))
    assert gradient.tolist() == pytest.approx([0.1 * 0.3] * 4)  # only the KL's


def test_importance_multiplies_loss_and_gradient_of_its_token():
    importance = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    plain, weighed, nothing = (loss_of(x) for x in (torch.ones(4).double(), importance, torch.zeros(4).double()))
    policy = (plain[1] - nothing[1]) * importance
    assert (weighed[1] - nothing[1]).tolist() == pytest.approx(policy.tolist())
    ratio = math.exp(0.1)
    assert weighed[2]["actor/pg_loss"] == pytest.approx((-0.5 * ratio - 2 * 2 * ratio - 0.5 * ratio) / 4)


@pytest.mark.parametrize("name", TELLING)
def test_nothing_waits_for_the_device(name):
    case = CASES[name]()
    with CountedReads(forbidden=True):
        case.corrected()


def test_importance_has_no_gradient():
    importance = torch.ones(4, dtype=torch.float64, requires_grad=True)
    loss_of(importance)
    assert importance.grad is None
    case = CASES["everything"]()
    leaves = [x.clone().requires_grad_() for x in (case.old, case.rollout)]
    answer = replace(case, old=leaves[0], rollout=leaves[1]).corrected()
    assert not answer.importance.requires_grad
    assert not any(x.requires_grad for pair in answer.sums.values() for x in pair)


def test_a_batch_without_old_log_probs_cannot_be_corrected():
    batch = collate(assemble(synthetic_groups(64, num_groups=1)))
    with pytest.raises(AssertionError, match="old log-probs"):
        corrected(batch, RolloutCorrection(rollout_is="token"))
