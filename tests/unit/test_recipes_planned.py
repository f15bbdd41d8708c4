"""Every recipe of GPUs is as fast as what `plan --search` finds for as many of them."""

from pathlib import Path

import pytest

from megatron_dapo.commands.plan.search import SHARED, ConfigSource, search
from megatron_dapo.commands.plan.step_time import Assumptions, run_time
from megatron_dapo.config.derived import shares_gpus
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.recompute import settled
from tests.proofs import amount
from tests.unit.test_recipes import MODELS, RECIPES_OF_GPUS

pytestmark = pytest.mark.unit

# Without servers of their own: nothing to divide.
WITHOUT = {"one_node_sft.yaml", "ppo_qwen2.5_7b.yaml"}
PLANNED = [name for name in RECIPES_OF_GPUS if name not in WITHOUT]
SHORT = ["one_gpu_1.5b.yaml", "one_node_qwen3_30b_a3b_full.yaml"]  # the least simulations


@pytest.mark.parametrize("name", PLANNED if amount(0, 1) else SHORT)
def test_a_recipe_is_within_a_tenth_of_the_best_of_its_kind(name):
    """Of its age, its GPUs and its way to use them: apart, or in turns."""
    path = Path(recipe(name.removesuffix(".yaml")))
    as_read = load_config(path)
    source = ConfigSource(path, (), MODELS[as_read.actor_rollout_ref.model.path])
    config = settled(as_read, source.actor)
    assumed = Assumptions.usual(config, HARDWARE["h100"])
    age = config.actor_rollout_ref.rollout.max_staleness
    (planned,) = run_time(config, source.actor, assumed, [age]).steps
    rows = search(source, config, assumed, [age])
    best = next(time for candidate, time in rows if candidate.keys[SHARED] == shares_gpus(config))
    assert planned.step <= 1.1 * best.step
