"""The loss of replayed tokens and the weights against the server, computed by hand."""

import math

import pytest
import torch

from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss, metric_names
from megatron_dapo.algorithms.metrics import finalize
from megatron_dapo.algorithms.policy_loss import OFF_POLICY_LOSSES, Clip, OffPolicy, policy_loss
from megatron_dapo.algorithms.rollout_correction import RatioBounds, token_importance

pytestmark = pytest.mark.unit

CLIP = Clip(0.2, 0.28, 3.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch_of(advantages, ratios, exp_mask=None, server_ratios=None, weights=None, **changes):
    """(log-probs that need a gradient, batch): ratio = new / old, server ratio = old / server."""
    old = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    rollout = None if server_ratios is None else old - tensor(*server_ratios).log()
    weights = torch.ones_like(old) if weights is None else tensor(*weights)
    batch = TokenBatch(
        weights=weights,
        count=(weights != 0).sum(),
        advantages=tensor(*advantages),
        old_log_probs=old,
        rollout_log_probs=rollout,
        exp_mask=None if exp_mask is None else tensor(*exp_mask),
    )
    return (old + tensor(*ratios).log()).requires_grad_(), batch


def loss_of(log_probs, batch, **config):
    result = dapo_loss(TokenOutputs(log_probs), batch, LossConfig(**{"clip": CLIP, "report_mismatch": False} | config))
    result.loss_sum.backward()
    return result.loss_sum.item(), log_probs.grad.tolist(), finalize(result.sums, result.maxima)


# advantage, ratio -> loss, d loss / d log_prob, with beta 0.1: f(r) = r / (r + 0.1), r f'(r) = 0.1
# r / (r + 0.1)^2
SHAPED = {
    "unlikely, good": (1.0, 0.1, -0.5, -0.25),
    "as likely, good": (2.0, 1.0, -2 / 1.1, -0.2 / 1.21),
    "likely, good: no clip": (1.0, 9.9, -0.99, -0.0099),
    "likely, bad: no dual clip": (-1.0, 9.9, 0.99, 0.0099),
    "unlikely, bad: no clip": (-1.0, 0.1, 0.5, 0.25),
}


@pytest.mark.parametrize("name", SHAPED)
def test_a_replayed_token_is_shaped_and_not_clipped(name):
    advantage, ratio, expected, gradient = SHAPED[name]
    loss, grad, shown = loss_of(*batch_of([advantage], [ratio], exp_mask=[1]), off_policy=OffPolicy())
    assert (loss, *grad) == pytest.approx((expected, gradient))
    assert shown["actor/pg_loss"] == shown["actor/off_pg_loss"] == pytest.approx(expected)
    assert "actor/on_pg_loss" not in shown and "actor/on_pg_clipfrac" not in shown  # nothing counted
    assert shown["exp_mask_ratio"] == 1.0


def test_beta_is_where_the_shaping_is_one_half():
    loss, _, _ = loss_of(*batch_of([1.0], [0.4], exp_mask=[1]), off_policy=OffPolicy(beta=0.4))
    assert loss == pytest.approx(-0.5)


@pytest.mark.parametrize("clip_high, expected, gradient", [(None, -1.28, 0.0), (1.0, -1.5, -1.5), (0.4, -1.4, 0.0)])
def test_a_replayed_token_may_be_clipped_with_an_upper_bound_of_its_own(clip_high, expected, gradient):
    off_policy = OffPolicy("dapo_clip_higher", clip_high=clip_high)
    loss, grad, _ = loss_of(*batch_of([1.0], [1.5], exp_mask=[1]), off_policy=off_policy)
    assert (loss, *grad) == pytest.approx((expected, gradient))


@pytest.mark.parametrize("mode", OFF_POLICY_LOSSES)
@pytest.mark.parametrize("rollout_is_threshold", [None, 2.0])
def test_gradients_of_replayed_and_new_tokens_together_equal_finite_differences(mode, rollout_is_threshold):
    """Ratios away from the kinks of the clip (0.8, 1.28, 1.5) and of the dual clip (3);
    importance is constant."""
    ratios, advantages = [0.5, 1.1, 1.4, 2.0, 5.0] * 2, [1.0, -1.0, 0.5, 2.0, -0.5] * 2
    log_probs, batch = batch_of(advantages, ratios, [1] * 5 + [0] * 5, [0.7] * 10, [1.0, 0.5, 0.0, 1.0, 1.0] * 2)
    off_policy = OffPolicy(mode, clip_high=0.5 if mode == "dapo_clip_higher" else None)
    config = LossConfig(
        clip=CLIP, report_mismatch=False, off_policy=off_policy, rollout_is_threshold=rollout_is_threshold
    )
    assert torch.autograd.gradcheck(lambda new: dapo_loss(TokenOutputs(new), batch, config).loss_sum, (log_probs,))


@pytest.mark.parametrize("mode", OFF_POLICY_LOSSES)
def test_on_policy_tokens_keep_their_loss_and_their_metrics(mode):
    # ratios 1.5 (clipped above, A > 0), 0.5 (clipped below), 4 (dual clip), 1 on-policy;
    # 5, 0.1, 6 replayed
    advantages, ratios = [1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0], [1.5, 0.5, 4.0, 1.0, 5.0, 0.1, 6.0]
    log_probs, batch = batch_of(advantages, ratios, exp_mask=[0, 0, 0, 0, 1, 1, 1])
    _, grad, shown = loss_of(log_probs, batch, off_policy=OffPolicy(mode))
    _, alone_grad, alone = loss_of(*batch_of(advantages[:4], ratios[:4]))
    assert grad[:4] == alone_grad
    for name in ("on_pg_loss", "on_pg_clipfrac", "on_pg_clipfrac_lower", "dual_clipfrac"):
        assert shown[f"actor/{name}"] == pytest.approx(alone[f"actor/{name}"]) and alone[f"actor/{name}"] != 0
    off = {
        "exgrpo_policy_shaping": (-5 / 5.1 + 0.1 / 0.2 + 6 / 6.1) / 3,
        "dapo_clip_higher": (-1.28 + 0.8 + 3.0) / 3,
    }[mode]
    on = (-1.28 + 0.8 + 3.0 - 1.0) / 4
    assert shown["actor/off_pg_loss"] == pytest.approx(off) and shown["actor/on_pg_loss"] == pytest.approx(on)
    assert shown["actor/loss"] == shown["actor/pg_loss"] == pytest.approx((4 * on + 3 * off) / 7)
    assert shown["exp_mask_ratio"] == pytest.approx(3 / 7)
    assert shown["actor/ratio_mean"] == pytest.approx(sum(ratios) / 7) and shown["actor/ratio_max"] == pytest.approx(6)


def test_the_parts_are_means_by_weight():
    log_probs, batch = batch_of([1.0, 1.0, 1.0], [1.1, 0.9, 1.0], exp_mask=[0, 0, 1], weights=[0.5, 0.25, 0.125])
    _, _, shown = loss_of(log_probs, batch, off_policy=OffPolicy())
    assert shown["actor/on_pg_loss"] == pytest.approx(-(0.5 * 1.1 + 0.25 * 0.9) / 0.75)
    assert shown["actor/off_pg_loss"] == pytest.approx(-1 / 1.1)


def test_what_is_not_counted_is_neither_replayed_nor_on_policy():
    log_probs, batch = batch_of([1.0, math.nan], [1.0, math.nan], exp_mask=[0, 1], weights=[1.0, 0.0])
    loss, grad, shown = loss_of(log_probs, batch, off_policy=OffPolicy())
    assert (loss, grad, shown["exp_mask_ratio"]) == (-1.0, [-1.0, 0.0], 0.0)


def test_without_an_exp_mask_every_token_is_on_policy():
    rows = [1.0, -1.0, -1.0], [1.5, 0.5, 4.0]
    loss, grad, shown = loss_of(*batch_of(*rows), off_policy=OffPolicy())
    # nor is it read without off_policy
    plain_loss, plain_grad, plain = loss_of(*batch_of(*rows, exp_mask=[1, 1, 1]))
    assert (loss, grad, shown) == (plain_loss, plain_grad, plain | {"exp_mask_ratio": 0.0})


def test_replayed_tokens_need_the_log_probs_of_the_policy_that_wrote_them():
    log_probs, batch = batch_of([1.0], [1.0], exp_mask=[1])
    batch = TokenBatch(batch.weights, batch.count, batch.advantages, exp_mask=batch.exp_mask)
    with pytest.raises(AssertionError, match="policy that wrote them"):
        loss_of(log_probs, batch, off_policy=OffPolicy())


@pytest.mark.parametrize("log_ratio", [-20.5, -19.5, 19.5, 20.5])
def test_the_shaping_keeps_its_digits_in_float32_and_the_clamp_stops_its_gradient(log_ratio):
    grads = []
    for dtype in (torch.float32, torch.float64):
        new, one = torch.tensor([log_ratio], dtype=dtype, requires_grad=True), torch.ones(1, dtype=dtype)
        result = policy_loss(
            new, 0 * one, one, one, torch.tensor(1), CLIP, off_policy=OffPolicy(), is_off_policy=one.bool()
        )
        result.loss_sum.backward()
        grads.append(new.grad.item())
    assert (grads[1] == 0) == (abs(log_ratio) > 20)
    # exp rounds its argument: 20 half units of float32
    assert grads[0] == pytest.approx(grads[1], rel=16 * 2.0**-23, abs=0)


# ----------------------------------------------------------------------- weights against the server


def test_importance_weights_are_truncated_multiply_the_policy_and_have_no_gradient():
    # server ratios 0.5, 1.5, 4: weights 0.5, 1.5, 2
    log_probs, batch = batch_of([1.0, -2.0, 1.0], [1.0, 1.0, 1.1], server_ratios=[0.5, 1.5, 4.0])
    batch.old_log_probs.requires_grad_(), batch.rollout_log_probs.requires_grad_()
    loss, grad, shown = loss_of(log_probs, batch, rollout_is_threshold=2.0)
    assert grad == pytest.approx([-0.5, 3.0, -2.2])
    assert loss == pytest.approx(-0.5 + 3.0 - 2.2) and shown["actor/pg_loss"] == pytest.approx(loss / 3)
    assert shown["actor/on_pg_loss"] == shown["actor/pg_loss"]
    assert shown["actor/rollout_is_mean"] == pytest.approx(4 / 3)
    assert shown["actor/rollout_is_truncated"] == pytest.approx(1 / 3)
    assert shown["actor/ratio_mean"] == pytest.approx(3.1 / 3)
    assert batch.old_log_probs.grad is None and batch.rollout_log_probs.grad is None


def test_importance_weights_leave_kl_and_entropy_alone():
    log_probs, batch = batch_of([1.0], [1.0], server_ratios=[0.5])
    batch = TokenBatch(**vars(batch) | {"ref_log_probs": torch.full((1,), -3.0, dtype=torch.float64)})
    config = LossConfig(
        CLIP,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="mse",
        entropy_coef=0.2,
        report_entropy=True,
        rollout_is_threshold=2.0,
    )
    result = dapo_loss(TokenOutputs(log_probs, tensor(0.7)), batch, config)
    assert result.loss_sum.item() == pytest.approx(0.5 * -1.0 + 0.1 * 0.5 - 0.2 * 0.7)


def test_replayed_tokens_are_weighed_too():
    loss, _, shown = loss_of(
        *batch_of([1.0, 1.0], [1.0, 1.0], exp_mask=[0, 1], server_ratios=[0.5, 4.0]),
        off_policy=OffPolicy(),
        rollout_is_threshold=2.0,
    )
    assert loss == pytest.approx(-0.5 - 2 / 1.1)
    assert shown["actor/on_pg_loss"] == pytest.approx(-0.5)
    assert shown["actor/off_pg_loss"] == pytest.approx(-2 / 1.1)


def test_without_old_log_probs_the_current_ones_are_compared_with_the_server():
    log_probs = tensor(-1.0, -1.0).requires_grad_()
    rollout = tensor(-1.0 - math.log(1.5), -1.0)
    batch = TokenBatch(torch.ones(2).double(), torch.tensor(2), tensor(1.0, 1.0), rollout_log_probs=rollout)
    loss, grad, shown = loss_of(log_probs, batch, rollout_is_threshold=2.0)
    # the weight moves nothing
    assert loss == pytest.approx(-2.5) and grad == pytest.approx([-1.5, -1.0])
    assert shown["actor/rollout_is_mean"] == pytest.approx(1.25)


@pytest.mark.parametrize("difference, weight", [(30.0, math.exp(20)), (-30.0, math.exp(-20)), (0.0, 1.0)])
def test_importance_is_clamped_before_exp_and_ignores_what_does_not_count(difference, weight):
    counted = torch.tensor([True, False])
    bounds = RatioBounds(None, 1e12)
    weights, sums = token_importance(tensor(difference, math.nan), tensor(0.0, math.inf), counted, bounds)
    assert weights.tolist() == pytest.approx([weight, 1.0])
    assert finalize(sums) == {
        "actor/rollout_is_mean": pytest.approx(weight),
        "actor/rollout_is_truncated": 0.0,
    }


def test_a_weight_of_exactly_the_cap_is_not_truncated():
    weights, sums = token_importance(tensor(0.0), tensor(0.0), torch.tensor([True]), RatioBounds(None, 1.0))
    assert weights.tolist() == [1.0] and finalize(sums)["actor/rollout_is_truncated"] == 0.0


def test_what_a_loss_is_made_of_unless_told():
    assert Clip() == Clip(low=0.2, high=0.28, dual=None, tau_pos=1.0, tau_neg=1.05, divergence=0.15)
    assert OffPolicy() == OffPolicy(mode="exgrpo_policy_shaping", beta=0.1, clip_high=None)
    assert LossConfig() == LossConfig(
        clip=Clip(0.2, 0.28, None),
        policy_loss="dapo",
        use_kl_loss=False,
        kl_loss_coef=0.0,
        kl_loss_type="low_var_kl",
        entropy_coef=0.0,
        report_entropy=False,
        report_mismatch=True,
        report_stale=False,
        off_policy=None,
        rollout_is_threshold=None,
        rollout_is_threshold_lower=None,
        bypass_mode=False,
    )


def test_the_names_of_the_metrics_follow_the_config():
    plain = metric_names(LossConfig())[0]
    names = metric_names(LossConfig(off_policy=OffPolicy(), rollout_is_threshold=2.0))[0]
    new = ("actor/off_pg_loss", "exp_mask_ratio", "actor/rollout_is_mean", "actor/rollout_is_truncated")
    assert tuple(name for name in names if name not in plain) == new
    assert tuple(name for name in names if name in plain) == plain
