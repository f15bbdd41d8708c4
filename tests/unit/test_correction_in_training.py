"""A rollout step with a correction: computations before the update, and effects in the update."""

from dataclasses import replace

import pytest
import torch

from megatron_dapo.training.losses import TokenSumLoss
from megatron_dapo.training.mismatch import stale
from tests import training_checks as checks

pytestmark = pytest.mark.unit

ACTOR = checks.ACTOR
CORRECTION = "algorithm.rollout_correction"
POLICY_ALONE = f"{ACTOR}.entropy_coef=0"
ONE_STEP = f"{ACTOR}.ppo_mini_batch_size=8"
TOKEN_IS = f"{CORRECTION}.rollout_is=token"
REJECT_ALL = (f"{CORRECTION}.rollout_rs=seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold=1e-9")
KEEP_ALL = (f"{CORRECTION}.rollout_rs=seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold=1e9")
BYPASS = f"{CORRECTION}.bypass_mode=true"


@pytest.fixture
def first_mini_batch(layout, model_path):
    """overrides -> (metric sums by name, metrics, gradients) of the first mini-batch of a step."""

    def run(*overrides: str, kernels: str = "auto"):
        all_overrides = [POLICY_ALONE, checks.MANY_MICRO_BATCHES, f"{ACTOR}.fused_kernels={kernels}", *overrides]
        policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, all_overrides)
        part = policy.accumulate_gradients(mini_batches[0])
        gradients = [p.main_grad.clone() for chunk in policy.model.chunks for p in chunk.parameters()]
        sums = dict(zip(part.sum_names, part.sums.tolist(), strict=True))
        return sums, policy.metrics_of(part), gradients

    return run


@pytest.mark.parametrize("kind, kernels", [("dapo", "auto"), ("dapo", "off"), ("cispo", "auto"), ("gspo", "auto")])
def test_rejecting_everything_gives_no_gradient_and_an_unchanged_count(first_mini_batch, kind, kernels):
    loss = f"{ACTOR}.policy_loss={kind}"
    plain, _, _ = first_mini_batch(loss, kernels=kernels)
    sums, metrics, gradients = first_mini_batch(loss, *REJECT_ALL, kernels=kernels)
    assert not any(gradient.any() for gradient in gradients)
    assert sums["actor/loss"] == [0.0, plain["actor/loss"][1]] and plain["actor/loss"][1] > 0
    assert metrics["actor/rollout_rs_token_masked"] == metrics["actor/rollout_rs_seq_masked"] == 1.0
    # the policy's metrics are of all tokens
    assert metrics["actor/ratio_mean"] == pytest.approx(1.0)


def test_rejecting_nothing_changes_nothing(first_mini_batch):
    _, plain, gradients = first_mini_batch()
    _, metrics, same = first_mini_batch(*KEEP_ALL)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    rejected = {"actor/rollout_rs_token_masked": 0.0, "actor/rollout_rs_seq_masked": 0.0}
    assert metrics == pytest.approx({**plain, **rejected}, rel=1e-12)


@pytest.mark.parametrize("bounds", ["2.0", "0.5_2.0"])
def test_tokens_are_weighed_alike_by_the_loss_and_before_it(first_mini_batch, bounds):
    """With one optimizer step the loss does it, unless a veto asks for old log-probs."""
    weighed = (ONE_STEP, TOKEN_IS, f"{CORRECTION}.rollout_is_threshold={bounds}")
    _, in_loss, gradients = first_mini_batch(*weighed)
    _, before, same = first_mini_batch(*weighed, f"{CORRECTION}.rollout_token_veto_threshold=1e-8")
    # float32 terms of both signs, their weights rounded in another order:
    # errors go with the largest gradient
    largest = max(gradient.abs().max() for gradient in gradients)
    for a, b in zip(gradients, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(largest))
    assert before.pop("actor/rollout_rs_token_masked") == before.pop("actor/rollout_rs_seq_masked") == 0.0
    assert before.keys() == in_loss.keys() and 0 < in_loss["actor/rollout_is_truncated"] < 1
    assert before == pytest.approx(in_loss, rel=1e-5, abs=1e-7)


def test_bypass_mode_computes_no_old_log_probs_and_takes_the_servers_for_them(layout, model_path):
    overrides = [POLICY_ALONE, BYPASS, checks.MANY_MICRO_BATCHES]
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, overrides)
    assert all(batch.old_log_probs is None for mini_batch in mini_batches for batch in mini_batch)
    metrics = policy.metrics_of(policy.accumulate_gradients(mini_batches[0]))
    batches = mini_batches[0]
    ratios, differences = [], []
    for batch, log_probs in zip(batches, policy.schedule.log_probs(batches), strict=True):
        difference = (log_probs - batch.rollout_log_probs)[batch.loss_mask != 0].double()
        differences.append(difference)
        ratios.append(difference.exp())
    assert metrics["actor/ratio_mean"] == pytest.approx(torch.cat(ratios).mean().item(), rel=1e-5)
    # the servers are compared with the policy as it is
    assert metrics["actor/rollout_kl"] == pytest.approx(-torch.cat(differences).mean().item(), rel=1e-5)
    assert metrics["actor/rollout_kl"] == pytest.approx(metrics["actor/ppo_kl"], rel=1e-5)


def test_in_bypass_mode_the_ratio_of_a_whole_response_is_to_the_server(layout, model_path):
    overrides = [POLICY_ALONE, BYPASS, checks.ONE_MICRO_BATCH, f"{ACTOR}.policy_loss=gspo"]
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, overrides)
    (batch,) = mini_batches[0]
    metrics = policy.metrics_of(policy.accumulate_gradients([batch]))
    (log_probs,) = policy.schedule.log_probs([batch])
    rows = [batch.by_sample(x) for x in (log_probs, batch.rollout_log_probs, batch.loss_mask)]
    ratios = []
    for index in batch.sample_ids:
        ours, servers, mask = (row[index].double() for row in rows)
        counted = mask != 0
        ratios += [(ours - servers)[counted].mean().exp()] * int(counted.sum())
    assert metrics["actor/ratio_mean"] == pytest.approx(torch.stack(ratios).mean().item(), rel=1e-5)


def test_in_bypass_mode_the_first_mini_batch_tells_of_foreign_samples(layout, model_path):
    overrides = [BYPASS, checks.MANY_MICRO_BATCHES]
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, overrides)
    shares = policy.mismatch_by_sample(mini_batches[:1], weight_version=0)
    seen = []
    policy.update(mini_batches, weight_version=0, check=seen.append)
    expected = sum(total for total, _ in shares.values()) / sum(number for _, number in shares.values())
    assert seen == [pytest.approx(expected, rel=1e-5)]


AT_AGE_1 = {
    "old log-probs": [TOKEN_IS],
    "one step": [TOKEN_IS, ONE_STEP],
    "one step, composed": [TOKEN_IS, ONE_STEP, f"{ACTOR}.fused_kernels=off"],
    "bypass": [BYPASS],
    "responses' ratio": [TOKEN_IS, ONE_STEP, f"{ACTOR}.policy_loss=gspo"],
    "own loss": [ONE_STEP, POLICY_ALONE, f"{ACTOR}.use_dapo=false", f"{ACTOR}.loss_function=tests.loss_functions:dapo"],
}


@pytest.mark.parametrize("name", AT_AGE_1)
def test_a_foreign_server_is_seen_in_tokens_of_older_weights(layout, model_path, name):
    """Its log-probs are 8 nats off, and every token is one version old, so none is `compared`. The
    check is of their mean, with either origin of the old log-probs."""
    overrides = ["actor_rollout_ref.rollout.max_staleness=1", checks.MANY_MICRO_BATCHES, *AT_AGE_1[name]]
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, overrides)
    foreign = [
        [replace(batch, rollout_log_probs=batch.rollout_log_probs - 8.0) for batch in mini_batch]
        for mini_batch in mini_batches
    ]
    of_first = foreign[:1] if name == "bypass" else foreign  # the part checked before any change
    shares = policy.mismatch_by_sample(of_first, weight_version=1)
    expected = sum(total for total, _ in shares.values()) / sum(number for _, number in shares.values())
    assert expected > 7.0 and len(shares) == (16 if name == "bypass" else 32)
    seen = []
    metrics = policy.update(foreign, weight_version=1, check=seen.append)
    if name == "old log-probs":
        seen = [policy.mean_mismatch(foreign, weight_version=1)]
    assert seen == [pytest.approx(expected, rel=1e-5)]
    assert metrics["actor/rollout_abs_diff_all"] == pytest.approx(expected, rel=0.05)
    assert "actor/rollout_abs_diff" not in metrics


def test_the_log_warns_of_distant_servers(layout, model_path, caplog):
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, [])
    # all tokens of version 0: nothing is compared
    metrics = policy.update(mini_batches, weight_version=6)
    assert "actor/rollout_ess" not in metrics and not caplog.messages
    share = policy.update(mini_batches, weight_version=0)["actor/rollout_ess"]
    assert share < 0.5 and caplog.messages[0].startswith("Step 1: ") and f"{share:.0%}" in caplog.messages[0]


@pytest.mark.parametrize("rejection, share", [(REJECT_ALL, "100%"), (KEEP_ALL, None)])
def test_the_log_warns_if_most_tokens_are_rejected(layout, model_path, caplog, rejection, share):
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, list(rejection))
    policy.update(mini_batches, weight_version=6)  # all tokens of version 0: nothing is compared
    assert [f"rejects {share}" in message for message in caplog.messages] == ([True] if share else [])


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_tokens_of_older_weights_have_metrics_of_their_own(layout, model_path, kernels):
    overrides = [f"{ACTOR}.fused_kernels={kernels}", "actor_rollout_ref.rollout.max_staleness=2", TOKEN_IS]
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, overrides)
    shown = {}
    for version in (0, 1):
        loss = replace(policy._loss, weight_version=version)
        shown[version] = policy.metrics_of(policy.accumulate_gradients(mini_batches[0], loss))
    current, older = shown[0], shown[1]
    for name in ("kl", "k3", "ess"):
        assert f"actor/rollout_{name}" not in older and f"actor/rollout_{name}_stale" not in current
        assert older[f"actor/rollout_{name}_stale"] == pytest.approx(current[f"actor/rollout_{name}"])
    assert (
        older["actor/rollout_ess_all"]
        == current["actor/rollout_ess_all"]
        == pytest.approx(older["actor/rollout_ess_stale"])
    )


def test_replayed_tokens_are_neither_of_these_weights_nor_older(layout, model_path):
    _, mini_batches = checks.policy_and_mini_batches(layout, model_path, [])
    batch = mini_batches[0][0]
    assert torch.equal(stale(batch, 1), batch.loss_mask != 0) and not stale(batch, 0).any()
    assert not stale(replace(batch, replayed=torch.ones_like(batch.replayed)), 1).any()


def test_without_old_weights_nothing_is_said_of_them(layout, model_path):
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, [])
    assert isinstance(policy._loss, TokenSumLoss) and not policy.loss_config.report_stale
    assert not any("stale" in name for name in policy.accumulate_gradients(mini_batches[0]).sum_names)
