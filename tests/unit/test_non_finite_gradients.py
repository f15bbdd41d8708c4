"""A non-finite gradient stops the run, on every rank at the same place,
before a server gets weights."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_dapo.config.loader import load_config
from megatron_dapo.training.distribute import StepDistributor
from megatron_dapo.training.policy import Policy
from tests.synthetic import synthetic_groups
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

SMALL = [
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
]
MEGATRON = "actor_rollout_ref.actor.megatron"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), "qwen2", layers=1, hidden=16, heads=2))


def policy_and_mini_batches(layout, model_path, overrides):
    config = load_config(None, [*SMALL, f"actor_rollout_ref.model.path={model_path}", *overrides])
    policy = Policy(config, layout)
    groups = synthetic_groups(policy.model.spec.vocab_size, num_groups=2)
    return policy, StepDistributor(config, layout, policy.model.spec)(0, groups).mini_batches


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_nonfinite_gradient_stops_the_run(layout, model_path, sharded, dtype, value):
    overrides = [f"{MEGATRON}.use_distributed_optimizer={str(sharded).lower()}", f"{MEGATRON}.dtype={dtype}"]
    policy, mini_batches = policy_and_mini_batches(layout, model_path, overrides)
    assert math.isfinite(policy.update(mini_batches, weight_version=0)["actor/grad_norm"])
    poisoned = [replace(batch, advantages=torch.full_like(batch.advantages, value)) for batch in mini_batches[0]]
    with pytest.raises(FloatingPointError, match="gradient norm of a mini-batch is (nan|inf)"):
        policy.update([poisoned], weight_version=0)


def test_the_host_is_not_stopped_for_every_bucket(layout, model_path):
    """Megatron's own check reads the norm of each bucket back,
    and raises on one rank while the others wait."""
    policy, _ = policy_and_mini_batches(layout, model_path, [])
    assert not any(stage.ddp_config.check_for_nan_in_grad for stage in policy.state.stages)
