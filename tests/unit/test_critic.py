"""The critic on one process: inputs of its loss, its stops, the origin of its weights."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_dapo.algorithms.kl import FixedKLController
from megatron_dapo.checkpointing.manifest import write_manifest
from megatron_dapo.checkpointing.model_weights import load_weights
from megatron_dapo.checkpointing.torch_dist.loading import load
from megatron_dapo.checkpointing.torch_dist.saving import save
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models.build import build_model
from megatron_dapo.models.hf_io import load_hf_weights
from megatron_dapo.training.advantages import estimate_advantages
from megatron_dapo.training.critic import Critic
from megatron_dapo.training.distribute import StepDistributor, StepShard
from tests.synthetic import synthetic_groups
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

SMALL = [
    "data.train_batch_size=2",
    "data.max_prompt_length=12",
    "data.max_response_length=24",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=1e-2",
]

DTYPES = [f"actor_rollout_ref.actor.megatron.dtype={dtype}" for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen2", layers=1, hidden=16, heads=2)


@pytest.fixture(scope="module")
def mixture_path(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("mixture"), "qwen3_moe", layers=1, hidden=16, heads=2)


@pytest.fixture(params=["dense", "mixture"])
def any_model_path(request, model_path, mixture_path) -> Path:
    return {"dense": model_path, "mixture": mixture_path}[request.param]


def scored(layout, model_path, *overrides: str) -> tuple[Critic, StepShard]:
    config = load_config(None, [*SMALL, f"actor_rollout_ref.model.path={model_path}", *overrides])
    critic = Critic(config, layout)
    groups = synthetic_groups(critic.model.spec.vocab_size, num_groups=2)
    shard = critic.score(StepDistributor(config, layout, critic.model.spec)(0, groups))
    return critic, estimate_advantages(shard, FixedKLController(0.0), config, layout)[0]


def test_without_gae_a_step_has_no_micro_batches_of_a_critic(layout, model_path):
    config = load_config(None, [*SMALL[:-2], f"actor_rollout_ref.model.path={model_path}"])
    shard = StepDistributor(config, layout, read_model_spec(model_path))(0, synthetic_groups(64, num_groups=2))
    assert shard.mini_batches and not shard.critic_mini_batches and not shard.rewards


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_learn_the_returns_and_the_metrics_say_so(layout, any_model_path, dtype):
    critic, shard = scored(layout, any_model_path, "critic.cliprange_value=null", dtype)
    first, *_, last = [critic.update(shard) for _ in range(30)]
    assert last["critic/vf_loss"] < 0.3 * first["critic/vf_loss"] and first["critic/lr"] == 1e-2
    # of values that are all 0
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-9)
    again = critic.score(shard)
    assert critic.update(again)["critic/explained_variance"] > 0.5


def test_a_value_that_left_its_range_has_no_gradient(layout, model_path):
    """Old values far below the returns, current ones beyond the range:
    the loss is that of the bound."""
    critic, shard = scored(layout, model_path)
    (mini_batch,) = critic.with_targets(shard)
    far = [replace(b, values=b.values - 1.0, returns=torch.full_like(b.returns, -3.0)) for b in mini_batch]
    first = critic.metrics_of(critic.accumulate_gradients(far))
    # V = 0, and R below
    assert first["critic/vf_clipfrac"] == 0.0 and first["critic/vf_loss"] == pytest.approx(9.0)
    above = [replace(b, values=b.values - 1.0, returns=b.returns * 0 + 3.0) for b in mini_batch]
    second = critic.metrics_of(critic.accumulate_gradients(above))
    assert second["critic/vf_clipfrac"] == 1.0 and second["critic/vf_loss"] == pytest.approx(3.8**2)
    assert not any(p.main_grad.any() for chunk in critic.model.chunks for p in chunk.parameters())


def test_the_coefficient_scales_the_gradient_and_not_the_reported_loss(layout, model_path):
    by_coefficient = {}
    for coefficient in (0.5, 1.5):
        critic, shard = scored(layout, model_path, f"critic.value_loss_coef={coefficient}")
        metrics = critic.metrics_of(critic.accumulate_gradients(critic.with_targets(shard)[0]))
        by_coefficient[coefficient] = (metrics["critic/vf_loss"], critic.model.head.weight.main_grad.clone())
    assert by_coefficient[0.5][0] == by_coefficient[1.5][0]
    torch.testing.assert_close(by_coefficient[1.5][1], 3 * by_coefficient[0.5][1])


def test_what_does_not_count_never_reaches_a_loss_or_a_metric(layout, model_path):
    critic, shard = scored(layout, model_path)

    def poisoned(batch):
        values, returns = (torch.where(batch.loss_mask != 0, x, math.nan) for x in (batch.values, batch.returns))
        return replace(batch, values=values, returns=returns)

    (clean,) = critic.with_targets(shard)
    expected = critic.metrics_of(critic.accumulate_gradients(clean))
    gradient = critic.model.head.weight.main_grad.clone()
    assert critic.metrics_of(critic.accumulate_gradients([poisoned(batch) for batch in clean])) == expected
    assert torch.equal(critic.model.head.weight.main_grad, gradient) and gradient.any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_gradient_stops_the_run(layout, model_path, value):
    critic, shard = scored(layout, model_path)
    bad = [[replace(batch, returns=torch.full_like(batch.returns, value)) for batch in shard.mini_batches[0]]]
    with pytest.raises(FloatingPointError, match="gradient norm of a mini-batch is (nan|inf)"):
        critic.update(shard.with_mini_batches(bad))


def test_a_sample_over_the_critics_cap_is_an_error_that_names_it(layout, model_path):
    with pytest.raises(UserError, match=r"does not fit into critic.max_tokens_per_microbatch=8: raise it to at least"):
        scored(layout, model_path, "critic.max_tokens_per_microbatch=8")


def test_a_critic_starts_from_a_policys_or_a_critics_checkpoint_of_this_program(layout, model_path, tmp_path):
    """Of a training checkpoint the critic's own folder counts;
    without one, the policy lends its body."""
    megatron = load_config(None, []).actor_rollout_ref.actor.megatron
    spec = read_model_spec(model_path)
    policy = build_model(spec, layout, megatron)
    load_hf_weights(policy, model_path, layout)
    folder = tmp_path / "checkpoint"
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "config.json").write_text((model_path / "config.json").read_text())
    save(folder / "megatron", policy, layout)
    write_manifest(folder, ["model"])

    def loaded() -> dict[str, torch.Tensor]:
        critic = build_model(spec.as_critic(), layout, megatron)
        load_weights(critic, folder, layout)
        return dict(critic.chunks[0].named_parameters())

    body = loaded()
    of_policy = dict(policy.chunks[0].named_parameters())
    assert body.keys() - of_policy.keys() == {"output_layer.bias"} and not body["output_layer.weight"].any()
    assert all(torch.equal(body[name], of_policy[name]) for name in of_policy if name != "output_layer.weight")

    critic, shard = scored(layout, model_path)
    critic.update(shard)
    save(
        folder / "critic", critic.model, layout, optimizer=critic.state.optimizer, lr_schedule=critic.state.lr_schedule
    )
    write_manifest(folder, ["model", "critic"])
    again = loaded()
    trained = dict(critic.model.chunks[0].named_parameters())
    assert again.keys() == trained.keys() and trained["output_layer.weight"].any()
    assert all(torch.equal(again[name], trained[name]) for name in trained)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reloaded_critic_continues_to_the_bit(layout, any_model_path, tmp_path, dtype):
    """In bfloat16 its float32 copies come back too: weights by themselves would begin
    with rounded values."""
    critic, shard = scored(layout, any_model_path, dtype)
    critic.update(shard)
    training = {"optimizer": critic.state.optimizer, "lr_schedule": critic.state.lr_schedule}
    save(tmp_path / "critic", critic.model, layout, **training)
    again, _ = scored(layout, any_model_path, dtype)
    training = {"optimizer": again.state.optimizer, "lr_schedule": again.state.lr_schedule}
    report = load(tmp_path / "critic", again.model, layout, **training)
    assert {"model", "optimizer", "lr_schedule"} <= set(report.restored)
    for _ in range(2):
        assert all(
            torch.equal(actual, expected)
            for chunk, other in zip(critic.model.chunks, again.model.chunks, strict=True)
            for actual, expected in zip(chunk.parameters(), other.parameters(), strict=True)
        )
        assert critic.update(shard) == again.update(shard)
