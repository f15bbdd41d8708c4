"""Values that follow from a config, and the plan that shows them."""

import pytest

from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.config.derived import (
    ParallelSizes,
    dapo_techniques,
    effective_clip,
    needs_reference,
    num_optimizer_steps_per_rollout_step,
    parallel_sizes,
    samples_per_rollout_step,
    servers_per_node,
    world_size,
)
from megatron_dapo.config.loader import load_config

pytestmark = pytest.mark.unit

ALL_FOUR = [
    "actor_rollout_ref.actor.use_dapo=true",
    "algorithm.dynamic_sampling={enable: true}",
    "algorithm.overlong_reward_shaping={enable: true, buffer_len: 64}",
]


@pytest.mark.parametrize(
    ("override", "off"),
    [
        ("actor_rollout_ref.actor.use_dapo=false", {"clip_higher"}),
        ("actor_rollout_ref.actor.clip_ratio_high=0.2", {"clip_higher"}),
        ("algorithm.dynamic_sampling.enable=false", {"dynamic_sampling"}),
        ("algorithm.dynamic_sampling.filter_mode=none", {"dynamic_sampling"}),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", {"token_level_loss"}),
        ("algorithm.overlong_reward_shaping.enable=false", {"overlong_shaping"}),
        ("algorithm.overlong_reward_shaping.penalty_factor=0", {"overlong_shaping"}),
        ("algorithm.dapo.enable=false", {"dynamic_sampling", "overlong_shaping"}),
        ("trainer.seed=3", set()),
    ],
)
def test_a_technique_counts_as_on_only_where_it_acts(override, off):
    techniques = dapo_techniques(load_config(None, [*ALL_FOUR, override]))
    assert len(techniques) == 4
    assert {name for name, is_on in techniques.items() if not is_on} == off


def test_the_clip_range_is_that_of_the_switch():
    assert effective_clip(load_config(None, ["actor_rollout_ref.actor.clip_ratio=0.1"])) == (0.1, 0.1)
    assert effective_clip(load_config(None, ["actor_rollout_ref.actor.use_dapo=true"])) == (0.2, 0.28)
    assert effective_clip(load_config(None, ["actor.use_dapo=true", "actor.clip_ratio_low=null"])) == (0.2, 0.28)
    both_null = ["actor.clip_ratio=0.1", "actor.clip_ratio_low=null", "actor.clip_ratio_high=null"]
    assert effective_clip(load_config(None, ["actor.use_dapo=true", *both_null])) == (0.1, 0.1)


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ([], False),
        (["actor_rollout_ref.actor.use_kl_loss=true"], False),
        (["actor_rollout_ref.actor.kl_loss_coef=0.1"], False),
        (["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1"], True),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1"], True),
        (["algorithm.kl_ctrl.kl_coef=0.1"], True),
        (["algorithm.use_kl_in_reward=false", "algorithm.kl_ctrl.kl_coef=0.1"], False),
    ],
)
def test_a_reference_model_is_needed_only_for_a_coefficient_that_acts(overrides, needed):
    config = load_config(None, overrides)
    assert needs_reference(config) is needed
    (line,) = [line for line in process_plan(config).splitlines() if line.startswith("  reference")]
    assert ("none: no KL coefficient" in line) is not needed


def test_rank_coordinates_are_megatrons_order():
    # Megatron-core's default order is tp-cp-ep-dp-pp: tensor ranks adjacent, then data,
    # pipeline last.
    sizes = ParallelSizes(tp=2, pp=2, vpp=None, world=8)
    coordinates = [sizes.coordinates(rank) for rank in range(8)]
    assert [(rank.tp, rank.pp, rank.dp) for rank in coordinates] == [
        (0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1),
    ]  # fmt: skip
    sizes = ParallelSizes(tp=2, pp=1, vpp=None, world=8, cp=2)
    assert [(rank.tp, rank.cp, rank.dp) for rank in map(sizes.coordinates, range(8))] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1),
    ]  # fmt: skip


def test_the_plan_says_how_many_servers_each_server_node_runs():
    server = "actor_rollout_ref.rollout.server"
    config = load_config(
        None, [f"{server}.nnodes=2", f"{server}.num_servers=4", f"{server}.tensor_model_parallel_size=4"]
    )
    assert servers_per_node(config) == 2 and servers_per_node(load_config(None, [f"{server}.num_servers=4"])) == 4
    assert "4 SGLang servers x TP 4, 2 on each of 2 server nodes" in process_plan(config)


def test_the_plan_names_every_process_and_the_sizes_of_a_step():
    config = load_config(
        None,
        [
            *ALL_FOUR,
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
            "actor_rollout_ref.rollout.server_urls=[http://127.0.0.1:30000]",
            "trainer.n_procs_per_node=8",
            "reward.num_workers=3",
        ],
    )
    assert (world_size(config), parallel_sizes(config).dp) == (8, 2)
    assert (num_optimizer_steps_per_rollout_step(config), samples_per_rollout_step(config)) == (4, 128)
    plan = process_plan(config)
    for words in (
        "8 ranks (1 node x 8): TP 2, PP 2, DP 2",
        "ranks 6-7  TP 0-1, PP 1, DP 1",
        "16 groups x 8 = 128 samples",
        "4 optimizer steps = 2 mini-batches of 64 samples (8 groups) x 2 passes",
        "http://127.0.0.1:30000",
        "controller    1 process",
        "rewards       3 processes",
        "runs/run",
        "2 process groups (one per pipeline stage)",
        "[0.8, 1.28]",
    ):
        assert words in plan, plan
    assert all(len(line) <= 120 for line in plan.splitlines())
