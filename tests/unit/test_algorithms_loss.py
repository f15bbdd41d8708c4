"""Promises of the actor's loss, held against formulas written down independently in float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dapo.algorithms.aggregation import AGGREGATIONS, token_weights
from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss, metric_names
from megatron_dapo.algorithms.metrics import finalize
from megatron_dapo.algorithms.policy_loss import Clip, policy_loss
from tests.metric_sums import add_sums, merge_maxima

pytestmark = pytest.mark.unit

MODES = list(AGGREGATIONS)
MAX_RESPONSE = 9
FULL = LossConfig(clip=Clip(0.2, 0.28, 3.0), use_kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.2, report_entropy=True)


# ---------------------------------------------------------------------- oracles, [B, S] and float64


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def vanilla_losses(old, new, advantages, low, high, dual):
    """verl's compute_policy_loss_vanilla, line by line, before aggregation."""
    log_ratio = torch.clamp(new - old, min=-20.0, max=20.0)
    ratio = torch.exp(log_ratio)
    losses1 = -advantages * ratio
    losses2 = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    clipped1 = torch.maximum(losses1, losses2)
    losses3 = -advantages * dual
    clipped2 = torch.min(losses3, clipped1)
    return torch.where(advantages < 0, clipped2, clipped1), ratio, log_ratio


def aggregate(losses, mask, mode):
    sums = (losses * mask).sum(-1)
    return {
        "token-mean": lambda: masked_mean(losses, mask),
        "seq-mean-token-sum": lambda: sums.mean(),
        "seq-mean-token-mean": lambda: (sums / mask.sum(-1)).mean(),
        "seq-mean-token-sum-norm": lambda: (sums / MAX_RESPONSE).mean(),
    }[mode]()


def random_case(seed: int, b: int = 5, s: int = 8, dtype=torch.float64):
    """Every sequence has a counted token; log-ratios and advantages wide enough
    for every branch."""
    rng = torch.Generator().manual_seed(seed)
    rand = lambda: torch.randn(b, s, generator=rng, dtype=torch.float64)  # noqa: E731
    mask = (torch.rand(b, s, generator=rng) < 0.6).double()
    mask[:, 2] = 1
    new = -rand().abs()
    case = dict(new=new, old=new + 0.8 * rand(), ref=new + rand(), rollout=new + 0.1 * rand(), adv=rand(), mask=mask)
    return {k: v.to(dtype) for k, v in (case | {"entropy": rand().abs()}).items()}


def batch_of(case: dict[str, Tensor], mode: str, rows=slice(None), **changes) -> TokenBatch:
    mask = case["mask"][rows]
    segments = torch.arange(mask.size(0))[:, None].expand_as(mask)
    weights, count = token_weights(mode, mask, segments, mask.size(0), MAX_RESPONSE, dtype=mask.dtype)
    fields = dict(
        weights=weights,
        count=count,
        advantages=case["adv"][rows],
        old_log_probs=case["old"][rows],
        ref_log_probs=case["ref"][rows],
        rollout_log_probs=case["rollout"][rows],
    )
    return TokenBatch(**(fields | changes))


def outputs_of(case: dict[str, Tensor], rows=slice(None)) -> TokenOutputs:
    return TokenOutputs(case["new"][rows], case["entropy"][rows])


# ---------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("mode, seed", list(itertools.product(MODES, range(3))))
def test_policy_loss_and_gradient_equal_the_reference_formula(mode, seed):
    case = random_case(seed)
    new, reference = case["new"].clone().requires_grad_(), case["new"].clone().requires_grad_()
    batch = batch_of(case, mode)
    ours = policy_loss(new, batch.old_log_probs, batch.advantages, batch.weights, batch.count, Clip(0.2, 0.28, 2.0))
    losses, _, _ = vanilla_losses(case["old"], reference, case["adv"], 0.2, 0.28, 2.0)
    expected = aggregate(losses, case["mask"], mode)
    torch.testing.assert_close(ours.loss_sum / batch.count, expected, rtol=1e-12, atol=0)
    (ours.loss_sum / batch.count).backward()
    expected.backward()
    torch.testing.assert_close(new.grad, reference.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", MODES)
def test_the_whole_loss_is_policy_plus_kl_minus_entropy(mode):
    case = random_case(7)
    batch = batch_of(case, mode)
    losses, _, _ = vanilla_losses(case["old"], case["new"], case["adv"], 0.2, 0.28, 3.0)
    log_ratio = case["ref"] - case["new"]
    k3 = log_ratio.exp() - log_ratio - 1
    expected = aggregate(losses + 0.3 * k3 - 0.2 * case["entropy"], case["mask"], mode)
    result = dapo_loss(outputs_of(case), batch, FULL)
    torch.testing.assert_close(result.loss_sum / batch.count, expected, rtol=1e-12, atol=0)
    shown = finalize(result.sums, result.maxima)
    assert shown["actor/loss"] == pytest.approx(float(expected))
    assert shown["actor/pg_loss"] == pytest.approx(float(aggregate(losses, case["mask"], mode)))
    assert shown["actor/on_pg_loss"] == shown["actor/pg_loss"]
    assert shown["actor/kl_loss"] == pytest.approx(float(aggregate(k3, case["mask"], mode)))
    assert shown["actor/entropy"] == pytest.approx(float(masked_mean(case["entropy"], case["mask"])))


# advantage, ratio, dual -> loss, d loss / d log_prob, clipfrac, clipfrac_lower, dual_clipfrac; low
# 0.2, high 0.28
BRANCHES = {
    "up, inside": (1.0, 1.1, 3.0, -1.1, -1.1, 0, 0, 0),
    "up, between 1 + low and 1 + high": (1.0, 1.25, 3.0, -1.25, -1.25, 0, 0, 0),
    "up, above": (1.0, 1.5, 3.0, -1.28, 0.0, 1, 0, 0),
    "up, far above the dual bound": (1.0, 5.0, 3.0, -1.28, 0.0, 1, 0, 0),
    "up, below: not clipped": (2.0, 0.5, 3.0, -1.0, -1.0, 0, 0, 0),
    "down, inside": (-1.0, 0.9, 3.0, 0.9, 0.9, 0, 0, 0),
    "down, between 1 - high and 1 - low": (-1.0, 0.75, 3.0, 0.8, 0.0, 0, 1, 0),
    "down, below": (-2.0, 0.5, 3.0, 1.6, 0.0, 0, 1, 0),
    "down, above: not clipped": (-1.0, 2.0, 3.0, 2.0, 2.0, 0, 0, 0),
    "down, above the dual bound": (-2.0, 4.0, 3.0, 6.0, 0.0, 0, 0, 1),
    "down, no dual bound": (-2.0, 4.0, None, 8.0, 8.0, 0, 0, 0),
    "no advantage": (0.0, 4.0, 3.0, 0.0, 0.0, 0, 0, 0),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_every_branch_of_the_clip_by_hand(name):
    advantage, ratio, dual, loss, gradient, upper, lower, dual_frac = BRANCHES[name]
    new = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    result = policy_loss(new, old, advantage * one, one, torch.tensor(1), Clip(0.2, 0.28, dual))
    result.loss_sum.backward()
    assert float(result.loss_sum.detach()) == pytest.approx(loss, abs=1e-12)
    assert float(new.grad) == pytest.approx(gradient, abs=1e-12)
    shown = finalize(result.sums, result.maxima)
    fractions = [shown[f"actor/{key}"] for key in ("on_pg_clipfrac", "on_pg_clipfrac_lower", "dual_clipfrac")]
    assert fractions == [upper, lower, dual_frac]
    assert shown["actor/ratio_mean"] == shown["actor/ratio_max"] == pytest.approx(ratio)
    assert shown["actor/ppo_kl"] == pytest.approx(-math.log(ratio))


def test_metrics_count_tokens_and_not_their_weights():
    case = random_case(3)
    losses, ratio, log_ratio = vanilla_losses(case["old"], case["new"], case["adv"], 0.2, 0.28, 3.0)
    mask, adv = case["mask"], case["adv"]
    for mode in MODES:
        result = dapo_loss(outputs_of(case), batch_of(case, mode), FULL)
        shown = finalize(result.sums, result.maxima)
        expected = {
            "actor/on_pg_clipfrac": masked_mean(((adv > 0) & (ratio > 1.28)).double(), mask),
            "actor/on_pg_clipfrac_lower": masked_mean(((adv < 0) & (ratio < 0.8)).double(), mask),
            "actor/dual_clipfrac": masked_mean(((adv < 0) & (ratio > 3.0)).double(), mask),
            "actor/ppo_kl": masked_mean(-log_ratio, mask),
            "actor/ratio_mean": masked_mean(ratio, mask),
            "actor/ratio_max": (ratio * mask).max(),
        }
        assert {name: shown[name] for name in expected} == pytest.approx({k: float(v) for k, v in expected.items()})
        assert min(shown["actor/on_pg_clipfrac"], shown["actor/on_pg_clipfrac_lower"]) > 0


def token_by_definition(log_ratio: float, advantage: float, low: float, high: float, dual: float | None):
    """(loss, its derivative by the log-prob) of one token, case by case: DAPO eq. 8, arXiv
    1912.09729 for the dual."""
    ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
    slope = 0.0 if abs(log_ratio) > 20.0 else -advantage * ratio
    if advantage >= 0:
        return (-advantage * ratio, slope) if ratio <= 1 + high else (-advantage * (1 + high), 0.0)
    if dual is not None and ratio > dual:
        return -advantage * dual, 0.0
    return (-advantage * ratio, slope) if ratio >= 1 - low else (-advantage * (1 - low), 0.0)


LOG_RATIO = st.one_of(st.floats(-1.5, 1.5), st.sampled_from([-50.0, -19.9, 0.0, 19.9, 50.0]))
TOKEN = st.tuples(LOG_RATIO, st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0]), st.sampled_from([0.0, 0.5, 1.0]))


@given(st.lists(TOKEN, max_size=10), st.sampled_from([None, 3.0, 10.0]))
@settings(deadline=None, max_examples=150)
def test_every_token_has_the_loss_of_its_case_for_any_mask_sign_and_ratio(tokens, dual):
    columns = list(zip(*tokens, strict=True)) or [()] * 3
    new, advantages, weights = (torch.tensor(column, dtype=torch.float64) for column in columns)
    new.requires_grad_()
    result = policy_loss(new, torch.zeros_like(new), advantages, weights, torch.tensor(1), Clip(0.2, 0.28, dual))
    result.loss_sum.backward()
    expected = [token_by_definition(log_ratio, advantage, 0.2, 0.28, dual) for log_ratio, advantage, _ in tokens]
    total = sum(weight * loss for (loss, _), (*_, weight) in zip(expected, tokens, strict=True))
    assert float(result.loss_sum.detach()) == pytest.approx(total, rel=1e-12, abs=1e-12)
    kinks = [math.log(bound) for bound in (0.8, 1.28, dual or 3.0)]
    for place, ((_, slope), (log_ratio, _, weight)) in enumerate(zip(expected, tokens, strict=True)):
        if min(abs(log_ratio - kink) for kink in kinks) > 1e-9:
            assert float(new.grad[place]) == pytest.approx(weight * slope, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("log_ratio, clamped", [(30.0, 20.0), (-30.0, -20.0)])
def test_the_log_ratio_is_clamped_and_has_no_gradient_beyond(log_ratio, clamped):
    # Only the other sign of the advantage is clipped.
    advantage = -1.0 if log_ratio > 0 else 1.0
    new = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    result = policy_loss(new, zero, advantage * one, one, torch.tensor(1), Clip(0.2, 0.28, None))
    result.loss_sum.backward()
    assert float(result.loss_sum.detach()) == pytest.approx(-advantage * math.exp(clamped))
    assert float(new.grad) == 0.0
    assert finalize(result.sums)["actor/ppo_kl"] == pytest.approx(-clamped)


def test_gradients_equal_finite_differences():
    case = random_case(11, b=3, s=4)
    batch = batch_of(case, "seq-mean-token-mean")

    def loss(new: Tensor, entropy: Tensor) -> Tensor:
        return dapo_loss(TokenOutputs(new, entropy), batch, FULL).loss_sum

    assert torch.autograd.gradcheck(loss, (case["new"].requires_grad_(), case["entropy"].requires_grad_()))


def test_the_gradient_is_that_of_the_log_probs_alone():
    """Old log-probs and importance weights are numbers, from any source."""
    case = random_case(6)
    old = case["old"].clone().requires_grad_()
    importance = torch.full_like(old, 0.5).requires_grad_()
    new = case["new"].clone().requires_grad_()
    batch = batch_of(case, "token-mean", old_log_probs=old, importance=importance)
    dapo_loss(TokenOutputs(new), batch, LossConfig()).loss_sum.backward()
    assert new.grad is not None and old.grad is None and importance.grad is None


def test_without_old_log_probs_the_step_is_on_policy():
    case = random_case(5)
    new = case["new"].clone().requires_grad_()
    batch = batch_of(case, "token-mean", old_log_probs=None)
    result = dapo_loss(TokenOutputs(new), batch, LossConfig(clip=Clip(0.2, 0.28, 3.0)))
    result.loss_sum.backward()
    torch.testing.assert_close(new.grad, -case["adv"] * case["mask"])  # plain policy gradient
    shown = finalize(result.sums, result.maxima)
    assert shown["actor/ratio_mean"] == shown["actor/ratio_max"] == 1.0
    assert shown["actor/ppo_kl"] == shown["actor/on_pg_clipfrac"] == shown["actor/on_pg_clipfrac_lower"] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_counted_leaks_neither_values_nor_gradients(bad, mode):
    case = random_case(2)
    outside = case["mask"] == 0
    poisoned = {k: v if k == "mask" else v.masked_fill(outside, bad) for k, v in case.items()}
    results = []
    for data in (case, poisoned):
        leaves = data["new"].clone().requires_grad_(), data["entropy"].clone().requires_grad_()
        result = dapo_loss(TokenOutputs(*leaves), batch_of(data, mode), FULL)
        result.loss_sum.backward()
        results.append((result.loss_sum.detach(), finalize(result.sums, result.maxima), *(x.grad for x in leaves)))
    (loss, metrics, *grads), (bad_loss, bad_metrics, *bad_grads) = results
    assert torch.equal(loss, bad_loss) and metrics == bad_metrics
    for grad, bad_grad in zip(grads, bad_grads, strict=True):
        assert torch.equal(grad, bad_grad) and not bad_grad[outside].any()


def test_the_policy_loss_alone_ignores_what_is_not_counted():
    new = torch.tensor([-1.0, math.nan, -1.0], requires_grad=True)
    nan = torch.tensor([-1.0, math.nan, math.nan])
    weights = torch.tensor([1.0, 0.0, 0.0])
    result = policy_loss(new, nan, nan, weights, torch.tensor(1), Clip())
    result.loss_sum.backward()
    assert float(result.loss_sum.detach()) == 1.0 and new.grad.tolist() == [1.0, 0.0, 0.0]
    assert finalize(result.sums, result.maxima)["actor/ratio_max"] == 1.0


def test_a_nan_that_counts_is_not_hidden():
    case = random_case(2)
    case["new"][0, 2] = math.nan
    assert dapo_loss(outputs_of(case), batch_of(case, "token-mean"), FULL).loss_sum.isnan()


def test_a_batch_where_nothing_counts_gives_zeros():
    case = random_case(1)
    case["mask"] = torch.zeros_like(case["mask"])
    new = case["new"].clone().requires_grad_()
    for mode in MODES:
        batch = batch_of(case, mode)
        result = dapo_loss(TokenOutputs(new, case["entropy"]), batch, FULL)
        result.loss_sum.backward()
        assert float(result.loss_sum.detach()) == 0.0 and int(batch.count) == 0 and not new.grad.any()
        assert finalize(result.sums, result.maxima) == {"actor/ratio_max": 0.0, "actor/rollout_abs_diff_max": 0.0}


@given(
    st.sampled_from(MODES),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.permutations(range(6)),
)
@settings(max_examples=60, deadline=None)
def test_loss_and_metrics_do_not_depend_on_how_a_batch_is_cut(mode, seed, piece_of_row, order):
    case = random_case(seed, b=6)
    case["mask"][0] = 0  # a sequence that counts for nothing
    whole = dapo_loss(outputs_of(case), batch_of(case, mode), FULL)
    loss, count, sums, maxima = 0.0, 0, {}, {}
    for piece in range(3):
        rows = [row for row in order if piece_of_row[row] == piece]
        if not rows:
            continue
        batch = batch_of(case, mode, rows)
        part = dapo_loss(outputs_of(case, rows), batch, FULL)
        loss, count = loss + float(part.loss_sum), count + int(batch.count)
        sums, maxima = add_sums(sums, part.sums), merge_maxima(maxima, part.maxima)
    assert count == int(batch_of(case, mode).count)
    assert loss == pytest.approx(float(whole.loss_sum), rel=1e-12, abs=1e-12)
    expected = finalize(whole.sums, whole.maxima)
    assert finalize(sums, maxima) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("entropy, kl, mismatch", list(itertools.product([False, True], repeat=3)))
def test_metric_names_are_known_beforehand_and_in_order(entropy, kl, mismatch):
    config = LossConfig(report_entropy=entropy, use_kl_loss=kl, report_mismatch=mismatch)
    case = random_case(0)
    result = dapo_loss(outputs_of(case), batch_of(case, "token-mean"), config)
    assert (tuple(result.sums), tuple(result.maxima)) == metric_names(config)
    assert ("actor/entropy" in result.sums, "actor/kl_loss" in result.sums) == (entropy, kl)
    assert all(x.dtype == torch.float64 and not x.requires_grad for pair in result.sums.values() for x in pair)


def test_float32_stays_close_to_float64():
    exact, single = random_case(4), random_case(4, dtype=torch.float32)
    for mode in MODES:
        a = dapo_loss(outputs_of(exact), batch_of(exact, mode), FULL)
        b = dapo_loss(outputs_of(single), batch_of(single, mode), FULL)
        assert b.loss_sum.dtype == torch.float32
        assert float(b.loss_sum) == pytest.approx(float(a.loss_sum), rel=1e-5)
        assert finalize(b.sums, b.maxima) == pytest.approx(finalize(a.sums, a.maxima), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "index", [slice(1, 4), torch.tensor([4, 0]), torch.tensor([True, False, True, False, False])], ids=type
)
def test_a_selection_keeps_the_same_tokens_in_every_field(index):
    case = random_case(8)
    batch = batch_of(case, "token-mean", is_current=case["mask"] != 0)
    part = batch.select(index)
    for name, values in vars(batch).items():
        kept = getattr(part, name)
        assert kept is values if name == "count" or values is None else torch.equal(kept, values[index]), name


# ---------------------------------------------------------------------------------- aggregation


@pytest.mark.parametrize(
    "mode, weights, count",
    [
        ("token-mean", [0, 1, 1, 0, 1, 0, 0], 3),
        ("seq-mean-token-sum", [0, 1, 1, 0, 1, 0, 0], 2),
        ("seq-mean-token-mean", [0, 0.5, 0.5, 0, 1, 0, 0], 2),
        ("seq-mean-token-sum-norm", [0, 0.125, 0.125, 0, 0.125, 0, 0], 2),
    ],
)
def test_weights_and_counts_by_hand(mode, weights, count):
    # Segments of 4, 1 and 2 tokens; the last (padding, or a filtered response) counts for nothing.
    mask, segments = torch.tensor([[0, 1, 1, 0, 1, 0, 0]]), torch.tensor([[0, 0, 0, 0, 1, 2, 2]])
    ours, counted = token_weights(mode, mask, segments, 3, max_response_length=8)
    assert ours.tolist() == [weights] and ours.dtype == torch.float32
    assert int(counted) == count and counted.dtype == torch.int64


def test_the_four_modes_are_those_of_the_config():
    from megatron_dapo.config.schema.actor_rollout_ref import ActorConfig

    assert set(ActorConfig.model_fields["loss_agg_mode"].annotation.__args__) == set(MODES)
