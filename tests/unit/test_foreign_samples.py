"""How far servers and trainer are apart: over all of a step, by sample, and by server, in words."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_dapo.config.derived import needs_old_log_probs
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.batching import assemble
from megatron_dapo.data.packing import collate
from megatron_dapo.job import foreign_samples
from megatron_dapo.training.mismatch import (
    all_mismatch_sums,
    difference_sums,
    few_effective_tokens,
    shares_of,
    step_warnings,
)
from tests.synthetic import synthetic_groups, with_replayed

pytestmark = pytest.mark.unit

PPO = ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=8"]
BOUND = "algorithm.rollout_correction.max_mismatch"


@pytest.mark.parametrize("packed", [True, False])
def test_the_mean_and_the_samples_shares_count_the_tokens_of_these_weights_alone(packed):
    """Against a loop over the samples themselves: the model's tokens, by no replayed sample,
    of version 0."""
    groups = with_replayed(synthetic_groups(64, num_groups=4, n=3))
    samples = assemble(groups)
    batches = [collate(part, pad_multiple=4, packed=packed) for part in (samples[:5], samples[5:], [])]
    generator = torch.Generator().manual_seed(1)
    ours = [-5.0 * torch.rand(batch.tokens.shape, generator=generator) for batch in batches]
    expected = {}
    for batch, log_probs in zip(batches, ours, strict=True):
        for sample_id, row in batch.by_sample(log_probs).items():
            sample = samples[sample_id]
            differences = [
                abs(float(a) - float(b))
                for a, b, counts in zip(row, sample.rollout_log_probs, sample.loss_mask, strict=True)
                if counts and not sample.exp_mask
            ]
            if differences:
                expected[sample_id] = (math.fsum(differences), len(differences))
    actual = shares_of(batches, ours, weight_version=0)
    assert {i: number for i, (_, number) in actual.items()} == {i: number for i, (_, number) in expected.items()}
    assert all(math.isclose(actual[i][0], total, rel_tol=1e-9) for i, (total, _) in expected.items())
    with_old = [batch.with_log_probs(old=log_probs) for batch, log_probs in zip(batches, ours, strict=True)]
    total, number = difference_sums(with_old, weight_version=0).tolist()
    assert number == sum(number for _, number in expected.values())
    assert math.isclose(total, math.fsum(total for total, _ in expected.values()), rel_tol=1e-9)
    assert shares_of(batches, ours, weight_version=1) == {}
    assert difference_sums(batches, weight_version=0) is None, "a stage without log-probs has nothing to say"


@pytest.mark.parametrize("packed", [True, False])
def test_a_response_over_two_versions_is_compared_where_the_current_one_wrote_it(packed):
    (group,) = synthetic_groups(64, num_groups=1, n=3)
    lengths = [sample.num_response_tokens for sample in group.samples]
    written = [(6,) * (length // 2) + (7,) * (length - length // 2) for length in lengths]
    samples = [
        replace(sample, weight_versions=versions, loss_mask=(1,) * length)
        for sample, versions, length in zip(group.samples, written, lengths, strict=True)
    ]
    batch = collate(assemble([replace(group, samples=tuple(samples))]), pad_multiple=4, packed=packed)
    old = batch.rollout_log_probs + 1.0
    for version in (5, 6, 7):
        numbers = [versions.count(version) for versions in written]
        expected = {i: (pytest.approx(number), number) for i, number in enumerate(numbers) if number}
        assert shares_of([batch], [old], version) == expected
        total, number = difference_sums([batch.with_log_probs(old=old)], version).tolist()
        assert number == sum(numbers) and total == pytest.approx(sum(numbers))


@pytest.mark.parametrize("packed", [True, False])
def test_with_older_tokens_all_but_replayed_ones_are_checked(packed):
    """Of versions 6 and 7, the newest first in the servers' favour: 7's are right,
    6's are off by 2."""
    (group,) = synthetic_groups(64, num_groups=1, n=3)
    lengths = [sample.num_response_tokens for sample in group.samples]
    samples = [
        replace(
            sample,
            weight_versions=(6,) * (length // 2) + (7,) * (length - length // 2),
            loss_mask=(1,) * length,
            exp_mask=number == 0,
        )
        for number, (sample, length) in enumerate(zip(group.samples, lengths, strict=True))
    ]
    batch = collate(assemble([replace(group, samples=tuple(samples))]), pad_multiple=4, packed=packed)
    old = batch.rollout_log_probs + 2.0 * (batch.weight_versions == 6)
    shares = shares_of([batch], [old], 7, with_stale=True)
    assert shares == {i: (pytest.approx(2.0 * (length // 2)), length) for i, length in enumerate(lengths) if i}
    expected = [sum(length // 2 * 2.0 for length in lengths[1:]), sum(lengths[1:])]
    sums = difference_sums([batch.with_log_probs(old=old)], 7, with_stale=True)
    assert sums.tolist() == pytest.approx(expected)
    assert all_mismatch_sums(batch, old, 7)["actor/rollout_abs_diff_all"] == tuple(pytest.approx(x) for x in expected)
    assert difference_sums([batch.with_log_probs(old=old)], 7).tolist()[0] == pytest.approx(0.0)


def test_a_log_prob_that_is_no_number_is_no_small_difference():
    [batch] = [collate(assemble(synthetic_groups(64, num_groups=1)))]
    total, _ = difference_sums([batch.with_log_probs(old=torch.full(batch.tokens.shape, math.nan))], 0).tolist()
    assert not total / 1.0 <= 0.5


def test_servers_are_named_worst_first_each_with_its_own_mean():
    servers_of = [("http://a:1",), ("http://b:1",), ("http://b:1",), ("http://a:1", "http://b:1"), ()]
    shares = {0: (1.0, 10), 1: (40.0, 10), 2: (60.0, 10), 3: (10.0, 10), 4: (2.0, 10)}
    said = foreign_samples(7, 2.26, 0.5, shares, servers_of)
    assert "\n" not in said and said.startswith("the batch of step 7 is not trained on") and f"{BOUND} 0.5" in said
    places = [said.index(text) for text in ("http://b:1 by 3.67", "http://a:1 by 0.55", "does not name by 0.2")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "metrics, percent",
    [
        ({"actor/rollout_ess": 0.49}, "49%"),
        ({"actor/rollout_ess": 0.9, "actor/rollout_ess_all": 0.2}, "20%"),
        ({"actor/rollout_ess": 0.3, "actor/rollout_ess_all": 0.5}, None),
        ({"actor/rollout_ess": 0.5}, None),
        ({}, None),
    ],
)
def test_a_step_whose_tokens_are_worth_less_than_half_of_them_is_warned_of(metrics, percent):
    warning = few_effective_tokens(metrics)
    assert (warning is None) == (percent is None) and (percent is None or percent in warning)
    assert warning is None or ("max_staleness" in warning) == ("actor/rollout_ess_all" in metrics)


def test_a_run_on_synthetic_batches_is_not_warned_of_servers_that_are_not_there():
    """Their log-probs are those of no model, and most tokens may be rejected for them."""
    metrics = {"actor/rollout_ess": 0.01, "actor/rollout_rs_token_masked": 0.9}
    assert len(step_warnings(load_config(None, []), metrics)) == 2
    assert len(step_warnings(load_config(None, ["trainer.replay=/batches"]), metrics)) == 2
    assert step_warnings(load_config(None, ["trainer.synthetic_batch=true"]), metrics) == []


def test_of_many_servers_the_worst_are_named():
    servers_of = [(f"http://s{number}:1",) for number in range(20)]
    said = foreign_samples(1, 3.0, 0.5, {number: (float(number), 1) for number in range(20)}, servers_of)
    named = [number for number in range(20) if f"http://s{number}:1 by" in said]
    assert named == list(range(12, 20)) and "and 12 more" in said


def test_a_critic_does_not_learn_before_the_batch_was_checked():
    """It learns before the policy: the policy's one forward pass would tell too late."""
    one_step = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    assert not needs_old_log_probs(load_config(None, one_step))
    assert needs_old_log_probs(load_config(None, [*one_step, *PPO]))
    assert not needs_old_log_probs(load_config(None, [*one_step, *PPO, f"{BOUND}=null"]))
