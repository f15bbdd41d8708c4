"""How far servers and trainer are apart: over all of a step, by sample, and by server, in words."""

import math

import pytest
import torch

from megatron_dapo.config.derived import needs_old_log_probs
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.batching import assemble
from megatron_dapo.data.packing import collate
from megatron_dapo.job import foreign_samples
from megatron_dapo.training.mismatch import difference_sums, shares_of
from tests.synthetic import synthetic_groups, with_replayed

pytestmark = pytest.mark.unit

PPO = ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=8"]
BOUND = "algorithm.rollout_correction.max_mismatch"


@pytest.mark.parametrize("packed", [True, False])
def test_the_mean_and_the_samples_shares_count_the_tokens_of_these_weights_alone(packed):
    """Against a loop over the samples themselves: the model's tokens, by no replayed sample, of version 0."""
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
    found = shares_of(batches, ours, weight_version=0)
    assert {i: number for i, (_, number) in found.items()} == {i: number for i, (_, number) in expected.items()}
    assert all(math.isclose(found[i][0], total, rel_tol=1e-9) for i, (total, _) in expected.items())
    with_old = [batch.with_log_probs(old=log_probs) for batch, log_probs in zip(batches, ours, strict=True)]
    total, number = difference_sums(with_old, weight_version=0).tolist()
    assert number == sum(number for _, number in expected.values())
    assert math.isclose(total, math.fsum(total for total, _ in expected.values()), rel_tol=1e-9)
    assert shares_of(batches, ours, weight_version=1) == {}
    assert difference_sums(batches, weight_version=0) is None, "a stage without log-probs has nothing to say"


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


def test_of_many_servers_the_worst_are_named():
    servers_of = [(f"http://s{number}:1",) for number in range(20)]
    said = foreign_samples(1, 3.0, 0.5, {number: (float(number), 1) for number in range(20)}, servers_of)
    named = [number for number in range(20) if f"http://s{number}:1 by" in said]
    assert named == list(range(12, 20)) and "and 12 more" in said


def test_a_critic_does_not_learn_before_the_batch_was_judged():
    """It learns before the policy, whose one forward pass would tell too late."""
    one_step = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    assert not needs_old_log_probs(load_config(None, one_step))
    assert needs_old_log_probs(load_config(None, [*one_step, *PPO]))
    assert not needs_old_log_probs(load_config(None, [*one_step, *PPO, f"{BOUND}=null"]))
