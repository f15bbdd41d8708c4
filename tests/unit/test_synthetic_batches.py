"""Synthetic batches: fit for training, always the same, without a server."""

from statistics import fmean

import numpy as np
import pytest

from megatron_dapo.checks.run_checks import validate
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.built_ins import estimators_with
from megatron_dapo.config.derived import needs_old_log_probs, uses_servers
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.batching import assemble
from megatron_dapo.data.samples import Sample
from megatron_dapo.rollout.drawing import Drawing
from megatron_dapo.rollout.synthetic_batches import SyntheticBatches
from megatron_dapo.rollout.token_checks import find_sample_fault

pytestmark = pytest.mark.unit

VOCABULARY, LONGEST = 50, 200


def config_of(*overrides: str) -> Config:
    sizes = (
        "data.train_batch_size=64",
        "actor_rollout_ref.rollout.n=8",
        "data.max_prompt_length=16",
        f"data.max_response_length={LONGEST}",
    )
    return load_config(None, ["trainer.synthetic_batch=true", *sizes, *overrides])


def samples_of(config: Config, step: int = 1) -> list[Sample]:
    batch = SyntheticBatches(config, VOCABULARY).next_batch(step, step - 1)
    return [sample for group in batch.groups for sample in group.samples]


def test_a_batch_has_the_configs_size_and_every_number_is_possible():
    samples = samples_of(config_of(), step=3)
    assert len(samples) == 64 * 8 and len({sample.uid for sample in samples}) == 64
    assert {find_sample_fault(sample, VOCABULARY) for sample in samples} == {None}
    assert all(set(sample.weight_versions.tolist()) == {2} for sample in samples)
    assert {sample.is_truncated for sample in samples if sample.num_response_tokens == LONGEST} == {True}
    assert set(np.concatenate([sample.response_tokens for sample in samples]).tolist()) == set(range(VOCABULARY))


def test_lengths_have_a_long_tail_up_to_the_longest_and_the_mean_that_the_plan_assumes():
    """A length's deviation is at most half of the longest, so that of the mean of 512 is 2.2 % of
    it: 4 of them."""
    lengths = [sample.num_response_tokens for sample in samples_of(config_of())]
    assert fmean(lengths) == pytest.approx(0.3 * LONGEST, abs=4 * 0.022 * LONGEST)
    assert max(lengths) == LONGEST and np.median(lengths) < fmean(lengths)


@pytest.mark.parametrize("estimator", estimators_with(per_token=False))
def test_no_response_has_an_advantage_of_zero(estimator):
    config = config_of(f"algorithm.adv_estimator={estimator}")
    groups = SyntheticBatches(config, VOCABULARY).next_batch(1, 0).groups
    assert all(sample.advantage != 0 for sample in assemble(groups, estimator=estimator))


def test_the_same_seed_and_step_give_the_same_batch_and_others_another():
    def batch(step: int = 4, *overrides: str):
        return SyntheticBatches(config_of(*overrides), VOCABULARY).next_batch(step, 3)

    assert batch() == batch()  # of two runs: a resumed one has not made the earlier ones
    assert batch().groups != batch(5).groups and batch().groups != batch(4, "trainer.seed=2").groups


def test_a_run_needs_neither_prompts_nor_servers_and_its_servers_cannot_differ_from_the_trainer():
    config = config_of()
    assert not uses_servers(config)
    with pytest.raises(UserError) as error:
        validate(config, None)
    assert not [sentence for sentence in error.value.sentences if "train_files" in sentence]
    assert "synthetic: random tokens" in process_plan(config)
    # a critic waits for the check of the servers' log-probs, if there is one
    gae = "algorithm.adv_estimator=gae"
    assert not needs_old_log_probs(config_of(gae, "actor_rollout_ref.actor.ppo_mini_batch_size=64"))
    assert needs_old_log_probs(
        config_of(gae, "trainer.synthetic_batch=false", "actor_rollout_ref.actor.ppo_mini_batch_size=64")
    )


def test_dumped_and_synthetic_batches_together_are_refused():
    with pytest.raises(UserError, match="synthetic_batch is true, but trainer.replay names the batches of here"):
        validate(config_of("trainer.replay=here"), None, check_files=False)


def test_a_run_with_servers_does_not_go_on_from_synthetic_batches():
    state = SyntheticBatches(config_of(), VOCABULARY).state_dict()
    with pytest.raises(UserError, match="replay of synthetic batches, which drew no prompts"):
        Drawing.load_state_dict(None, state)  # type: ignore[arg-type]  # it reads the state first
