"""Promises of the advantages that wait for the models: KL in the reward and estimates per token, against a loop over
samples in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_dapo.algorithms.kl import KL_CONTROLLERS, FixedKLController
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.batching import assemble
from megatron_dapo.data.packing import collate
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.advantages import estimate_advantages
from megatron_dapo.training.distribute import StepShard
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit

KL = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_penalty=low_var_kl"]
GAE = ["algorithm.adv_estimator=gae", "algorithm.gamma=0.9", "algorithm.lam=0.8"]
REINFORCE = ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"]
BETA = 0.1


@pytest.fixture(scope="module")
def layout():
    yield ParallelLayout.initialize()
    ParallelLayout.shutdown()


def samples_of(estimator: str = "grpo"):
    """12 samples in 4 groups, with holes in their masks; one of them counts for nothing."""
    groups = [replace(group, baseline_reward=0.25) for group in synthetic_groups(67, num_groups=4, n=3)]
    samples = assemble(groups, estimator=estimator)
    return [*samples[:-1], replace(samples[-1], loss_mask=np.zeros_like(samples[-1].loss_mask))]


def said_by_the_models(samples) -> dict[int, dict[str, np.ndarray]]:
    """Old and reference log-probs and values, per sample."""
    rng = np.random.default_rng(0)
    names = ("old_log_probs", "ref_log_probs", "values")
    return {s.sample_id: {name: rng.normal(size=s.length).astype(np.float32) for name in names} for s in samples}


def shard_of(samples, packed: bool, sizes: list[list[int]]) -> StepShard:
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

    outcomes = {s.sample_id: s.earned for s in samples}
    return StepShard([[filled(batch) for batch in mini] for mini in mini_batches], outcomes)


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


def token_rewards(sample, said, beta: float) -> np.ndarray:
    rewards = -beta * k3(*(said[name].astype(np.float64) for name in ("old_log_probs", "ref_log_probs")))
    counted = np.flatnonzero(sample.loss_mask)
    if len(counted):
        rewards[counted[-1]] += sample.reward
    return rewards


def expected(samples, beta: float, gamma: float, lam: float, with_values: bool):
    """(whitened advantages, returns, mean, std before whitening), per sample, by the definitions."""
    said, raw, returns = said_by_the_models(samples), {}, {}
    for sample in samples:
        rewards = token_rewards(sample, said[sample.sample_id], beta)
        values = said[sample.sample_id]["values"].astype(np.float64) * with_values
        advantages, target, running, after = np.zeros(sample.length), np.zeros(sample.length), 0.0, 0.0
        for t in reversed(np.flatnonzero(sample.loss_mask)):
            running = rewards[t] + gamma * after - values[t] + gamma * lam * running
            after = values[t]
            advantages[t], target[t] = running, running + values[t]
        raw[sample.sample_id], returns[sample.sample_id] = advantages, target
    flat = np.concatenate([raw[s.sample_id][s.loss_mask != 0] for s in samples])
    mean, std = flat.mean(), flat.std(ddof=1)
    whitened = {s.sample_id: np.where(s.loss_mask != 0, (raw[s.sample_id] - mean) / std, 0.0) for s in samples}
    return whitened, returns, mean, std


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_estimates_per_token_are_those_of_a_loop_over_samples(layout, estimator, beta, cut):
    config = load_config(None, [*(GAE if estimator == "gae" else REINFORCE), *(KL if beta else [])])
    samples = samples_of(estimator)
    shard, metrics = estimate_advantages(shard_of(samples, *CUTS[cut]), FixedKLController(beta), config, layout)
    whitened, returns, mean, std = expected(samples, beta, 0.9, *((0.8, True) if estimator == "gae" else (1.0, False)))
    got = estimates(shard)
    for sample in samples:  # float32 keeps 7 digits of numbers of order 10
        np.testing.assert_allclose(got["advantages"][sample.sample_id], whitened[sample.sample_id], atol=3e-6)
        np.testing.assert_allclose(got["returns"][sample.sample_id], returns[sample.sample_id], atol=3e-6)
    assert metrics["actor/advantage_mean"] == pytest.approx(mean) and metrics["actor/advantage_std"] == pytest.approx(
        std
    )
    assert ("actor/reward_kl_penalty" in metrics) == (beta > 0)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "remax"])
def test_a_group_is_compared_again_after_the_penalty(layout, estimator, cut):
    config = load_config(None, [f"algorithm.adv_estimator={estimator}", *KL])
    samples = samples_of(estimator)
    said = said_by_the_models(samples)
    shard, _ = estimate_advantages(shard_of(samples, *CUTS[cut]), FixedKLController(BETA), config, layout)
    got = estimates(shard)["advantages"]
    for start in range(0, 12, 3):
        group = samples[start : start + 3]
        rewards = []
        for sample in group:
            kl = k3(*(said[sample.sample_id][name].astype(np.float64) for name in ("old_log_probs", "ref_log_probs")))
            rewards.append(sample.reward - BETA * (kl * sample.loss_mask).sum())
        rewards = np.array(rewards)
        by_hand = {
            "grpo": (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6),
            "rloo": np.array([r - (rewards.sum() - r) / 2 for r in rewards]),
            "remax": rewards - 0.25,
        }[estimator]
        for sample, value in zip(group, by_hand, strict=True):
            np.testing.assert_allclose(got[sample.sample_id], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", [[], REINFORCE])
def test_the_controller_sees_the_mean_of_the_samples_means_and_moves_for_the_next_step(layout, estimator):
    config = load_config(None, [*estimator, *KL, "algorithm.kl_ctrl.type=adaptive"])
    samples = samples_of()
    said = said_by_the_models(samples)
    columns = [(said[s.sample_id], s.loss_mask != 0) for s in samples]
    kl = [k3(row["old_log_probs"].astype(float), row["ref_log_probs"].astype(float))[mask] for row, mask in columns]
    mean_of_means = np.mean([row.mean() for row in kl if len(row)])  # one sample has no token that counts
    controller = KL_CONTROLLERS["adaptive"](BETA, 0.01, 1000)
    _, metrics = estimate_advantages(shard_of(samples, *CUTS["small"]), controller, config, layout)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(mean_of_means, rel=1e-6)
    assert np.concatenate(kl).mean() != pytest.approx(mean_of_means, rel=1e-3)
    assert metrics["actor/reward_kl_penalty_coeff"] == BETA  # what this step used
    assert controller.value == pytest.approx(BETA * (1 + 0.2 * 12 / 1000))  # far above the target: clipped at 0.2


def test_without_a_penalty_the_estimates_over_groups_are_left_as_they_are(layout):
    shard = shard_of(samples_of(), *CUTS["small"])
    same, metrics = estimate_advantages(shard, FixedKLController(0.0), load_config(None, []), layout)
    assert same is shard and metrics == {}
