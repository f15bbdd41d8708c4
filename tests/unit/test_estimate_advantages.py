"""Advantages that wait for the models: KL in the reward and estimates per token.

Compared with a loop over samples in float64.
"""

import pkgutil
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_dapo.algorithms.estimators import GroupRewards
from megatron_dapo.algorithms.gae import TokenRewards
from megatron_dapo.algorithms.kl import KL_CONTROLLERS, FixedKLController
from megatron_dapo.config.built_ins import ESTIMATORS, estimators_with
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.batching import SampleReward, TrainSample, assemble, sample_rewards
from megatron_dapo.data.packing import collate
from megatron_dapo.training.advantages import estimate_advantages
from megatron_dapo.training.distribute import StepShard
from tests.advantage_oracle import OF_RESPONSE, OF_TOKENS, PlainGroup
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit

KL = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_penalty=low_var_kl"]
REINFORCE = ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"]
BETA, GAMMA, LAM, BASELINE = 0.1, 0.9, 0.8, 0.25


def samples_of(estimator: str = "grpo") -> tuple[list[TrainSample], dict[int, SampleReward]]:
    """12 samples in 4 groups, with holes in their masks, one without any counted token.
    And their rewards."""
    groups = [replace(group, baseline_reward=BASELINE) for group in synthetic_groups(67, num_groups=4, n=3)]
    samples = assemble(groups, estimator=estimator)
    last = replace(samples[-1], loss_mask=np.zeros_like(samples[-1].loss_mask))
    return [*samples[:-1], last], sample_rewards(groups)


def said_by_the_models(samples) -> dict[int, dict[str, np.ndarray]]:
    """Old and reference log-probs and values, per sample."""
    rng = np.random.default_rng(0)
    names = ("old_log_probs", "ref_log_probs", "values")
    return {s.sample_id: {name: rng.normal(size=s.length).astype(np.float32) for name in names} for s in samples}


def shard_of(samples, rewards, packed: bool, sizes: list[list[int]]) -> StepShard:
    """Mini-batches of micro-batches of so many samples; a dummy at the end."""
    said, remaining, mini_batches = said_by_the_models(samples), iter(samples), []
    for micro_sizes in sizes:
        bins = [[next(remaining) for _ in range(size)] for size in micro_sizes]
        mini_batches.append([collate(bin_, pad_multiple=4, packed=packed) for bin_ in bins])

    def filled(batch):
        columns = {
            name: batch.from_samples({i: torch.from_numpy(said[i][name]) for i in batch.sample_ids})
            for name in ("old_log_probs", "ref_log_probs", "values")
        }
        columns["values"] = torch.where(batch.loss_mask != 0, columns["values"], torch.nan)
        return replace(batch, **columns)

    return StepShard([[filled(batch) for batch in mini] for mini in mini_batches], rewards)


CUTS = {"one packed row": (True, [[12]]), "small": (True, [[3, 2], [4, 3, 0]]), "padded": (False, [[5, 1], [6, 0]])}


def estimates(shard: StepShard) -> dict[str, dict[int, np.ndarray]]:
    batches = [batch for mini in shard.mini_batches for batch in mini]
    return {
        name: {i: row.double().numpy() for batch in batches for i, row in batch.by_sample(getattr(batch, name)).items()}
        for name in ("advantages", "returns")
        if getattr(batches[0], name) is not None
    }


def k3(old: np.ndarray, ref: np.ndarray) -> np.ndarray:
    return np.clip(np.exp(ref - old) - 1 - (ref - old), -10, 10)


def kl_of(said: Mapping[str, np.ndarray]) -> np.ndarray:
    return k3(*(said[name].astype(np.float64) for name in ("old_log_probs", "ref_log_probs")))


def expected(estimator: str, samples, rewards: Mapping[int, SampleReward], beta: float):
    """(advantages before whitening, values), of the counted tokens of each sample,
    by the definitions."""
    advantages, values = {}, {}
    for sample in samples:
        said, counted = said_by_the_models(samples)[sample.sample_id], sample.loss_mask != 0
        of_tokens = -beta * kl_of(said)[counted]
        of_tokens[-1:] += rewards[sample.sample_id].reward
        values[sample.sample_id] = said["values"].astype(np.float64)[counted]
        advantages[sample.sample_id] = OF_TOKENS[estimator](of_tokens, values[sample.sample_id], GAMMA, LAM)
    return advantages, values


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("estimator", estimators_with(per_token=True))
def test_estimates_per_token_are_those_of_a_loop_over_samples(layout, estimator, beta, cut):
    row, (samples, rewards) = ESTIMATORS[estimator], samples_of(estimator)
    keys = [f"algorithm.gamma={GAMMA}"] * row.discounts + [f"algorithm.lam={LAM}"] * row.needs_critic
    config = load_config(None, [f"algorithm.adv_estimator={estimator}", *keys, *(KL if beta else [])])
    shard = shard_of(samples, rewards, *CUTS[cut])
    shard, metrics = estimate_advantages(shard, FixedKLController(beta), config, layout)
    raw, values = expected(estimator, samples, rewards, beta)
    flat = np.concatenate(list(raw.values()))
    mean, std = flat.mean(), flat.std(ddof=1)
    got = estimates(shard)
    for sample in samples:  # float32 keeps 7 digits of numbers of order 10
        i, counted = sample.sample_id, sample.loss_mask != 0
        returns = raw[i] + values[i] * row.needs_critic
        for name, wanted in {"advantages": (raw[i] - mean) / std, "returns": returns}.items():
            np.testing.assert_allclose(got[name][i][counted], wanted, atol=3e-6)
            assert not got[name][i][~counted].any()
    assert metrics["actor/advantage_mean"] == pytest.approx(mean)
    assert metrics["actor/advantage_std"] == pytest.approx(std)
    assert ("actor/reward_kl_penalty" in metrics) == (beta > 0)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("estimator", estimators_with(per_token=False, divides_by_mean=False))
def test_a_group_is_compared_again_after_the_penalty(layout, estimator, cut):
    config = load_config(None, [f"algorithm.adv_estimator={estimator}", *KL])
    samples, rewards = samples_of(estimator)
    said = said_by_the_models(samples)
    shard = shard_of(samples, rewards, *CUTS[cut])
    shard, _ = estimate_advantages(shard, FixedKLController(BETA), config, layout)
    got = estimates(shard)["advantages"]
    penalties = [BETA * float((kl_of(said[s.sample_id]) * s.loss_mask).sum()) for s in samples]
    for start, group in zip(range(0, 12, 3), synthetic_groups(67, num_groups=4, n=3), strict=True):
        plain = PlainGroup(
            rewards=[each.reward - penalties[start + i] for i, each in enumerate(group.samples)],
            correct=[each.correct for each in group.samples],
            num_tokens=[len(each.response_tokens) for each in group.samples],
            num_counted=[int(each.loss_mask.sum()) for each in group.samples],
            baseline=BASELINE,
        )
        for i in range(3):
            np.testing.assert_allclose(got[start + i], OF_RESPONSE[estimator](plain, i), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", estimators_with(per_token=False))
def test_a_row_says_what_an_estimate_over_a_group_reads(estimator):
    estimate, row = pkgutil.resolve_name(ESTIMATORS[estimator].function), ESTIMATORS[estimator]
    numbers = [torch.tensor(column, dtype=torch.float64) for column in ([1, 0.5, 2], [1, 0, 1], [3, 1, 5], [2, 1, 4])]
    group = GroupRewards(*numbers, baseline=0.5)

    def changes(**other) -> bool:
        return not torch.equal(estimate(replace(group, **other)), estimate(group))

    assert changes(baseline=0.25) == row.needs_baseline
    assert changes(normalize_by_std=False) == row.divides_by_std
    assert not (row.discounts or row.needs_critic)


@pytest.mark.parametrize("estimator", estimators_with(per_token=True))
def test_a_row_says_what_an_estimate_per_token_reads(estimator):
    estimate, row = pkgutil.resolve_name(ESTIMATORS[estimator].function), ESTIMATORS[estimator]
    ones, is_end = torch.ones(3, dtype=torch.float64), torch.tensor([False, False, True])
    tokens = TokenRewards(ones, ones != 0, is_end, 0.5 * ones, GAMMA, LAM)

    def changes(**other) -> bool:
        return not torch.equal(estimate(tokens._replace(**other))[0], estimate(tokens)[0])

    assert changes(gamma=0.5) == row.discounts
    assert changes(lam=0.5) == changes(values=ones) == row.needs_critic
    assert not (row.needs_baseline or row.needs_others or row.divides_by_std)


@pytest.mark.parametrize("estimator", [[], REINFORCE])
def test_the_controller_sees_the_mean_of_the_samples_means_and_moves_for_the_next_step(layout, estimator):
    config = load_config(None, [*estimator, *KL, "algorithm.kl_ctrl.type=adaptive"])
    samples, rewards = samples_of()
    said = said_by_the_models(samples)
    columns = [(said[s.sample_id], s.loss_mask != 0) for s in samples]
    kl = [k3(row["old_log_probs"].astype(float), row["ref_log_probs"].astype(float))[mask] for row, mask in columns]
    # one sample has no token that counts
    mean_of_means = np.mean([row.mean() for row in kl if len(row)])
    controller = KL_CONTROLLERS["adaptive"](BETA, 0.01, 1000)
    _, metrics = estimate_advantages(shard_of(samples, rewards, *CUTS["small"]), controller, config, layout)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(mean_of_means, rel=1e-6)
    assert np.concatenate(kl).mean() != pytest.approx(mean_of_means, rel=1e-3)
    assert metrics["actor/reward_kl_penalty_coeff"] == BETA  # the step's own coefficient
    assert controller.value == pytest.approx(BETA * (1 + 0.2 * 12 / 1000))  # far above the target: clipped at 0.2


def test_without_a_penalty_the_estimates_over_groups_are_left_as_they_are(layout):
    shard = shard_of(*samples_of(), *CUTS["small"])
    same, metrics = estimate_advantages(shard, FixedKLController(0.0), load_config(None, []), layout)
    assert same is shard and metrics == {}
