"""Every shipped recipe parses, is free of contradictions, and has on what its name promises."""

from pathlib import Path

import pytest

from megatron_dapo.config import (
    Config,
    dapo_techniques,
    data_parallel_size,
    effective_clip,
    load_config,
    needs_reference,
    num_optimizer_steps_per_rollout_step,
    process_plan,
    samples_per_rollout_step,
    to_yaml,
    uses_critic,
    validate,
)

pytestmark = pytest.mark.unit

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(path.name for path in CONFIGS.glob("*.yaml"))
MODELS = {  # the sizes in the published config.json of each model
    "models/Qwen2.5-32B": {
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "max_position_embeddings": 131072,
        "vocab_size": 152064,
    },
    "models/Qwen2.5-7B": {
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "vocab_size": 152064,
    },
    "models/Qwen2.5-3B-Instruct": {
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}
ALL_FOUR_ON = {"clip_higher": True, "dynamic_sampling": True, "token_level_loss": True, "overlong_shaping": True}


def recipe(name: str) -> Config:
    return load_config(CONFIGS / name, [])


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_free_of_mistakes(name):
    config = recipe(name)
    validate(config, MODELS.get(config.actor_rollout_ref.model.path), check_files=False)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_being_written_out(name, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(recipe(name)), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml", []) == recipe(name)


@pytest.mark.parametrize("name", [name for name in RECIPES if "dapo_" in name])
def test_a_dapo_recipe_has_all_four_techniques_on_and_its_model_is_checked(name):
    config = recipe(name)
    assert dapo_techniques(config) == ALL_FOUR_ON
    assert config.actor_rollout_ref.model.path in MODELS
    assert not needs_reference(config)


def test_the_32b_recipe_is_the_published_run():
    config = recipe("dapo_qwen2.5_32b.yaml")
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    shaping = config.algorithm.dapo.overlong_reward_shaping
    assert (data.train_batch_size, rollout.n, samples_per_rollout_step(config)) == (512, 16, 8192)
    assert (data.gen_batch_size, config.algorithm.dapo.dynamic_sampling.max_num_gen_batches) == (1536, 10)
    assert (actor.ppo_mini_batch_size * rollout.n, num_optimizer_steps_per_rollout_step(config)) == (512, 16)
    assert (data.max_prompt_length, data.max_response_length, data.truncation) == (2048, 20480, "left")
    assert (data.max_response_length - shaping.buffer_len, shaping.buffer_len, shaping.penalty_factor) == (
        16384,
        4096,
        1.0,
    )
    assert (effective_clip(config), actor.clip_ratio_c, actor.loss_agg_mode) == ((0.2, 0.28), 10.0, "token-mean")
    optim = actor.optim
    assert (optim.lr, optim.lr_decay_style, optim.lr_warmup_steps) == (1e-6, "constant", 20)
    assert (optim.weight_decay, optim.clip_grad, optim.betas) == (0.1, 1.0, (0.9, 0.999))
    assert (rollout.temperature, rollout.top_p, rollout.top_k, rollout.val_n) == (1.0, 1.0, -1, 32)
    assert (actor.entropy_coef, config.reward.function, data_parallel_size(config)) == (0.0, "math_dapo", 8)


def test_the_ppo_recipe_has_a_critic_that_learns_first_and_tells_so():
    config = recipe("ppo_qwen2.5_7b.yaml")
    assert uses_critic(config) and needs_reference(config) and config.trainer.critic_warmup > 0
    assert (
        config.actor_rollout_ref.model.path in MODELS
        and config.critic.optim.lr > config.actor_rollout_ref.actor.optim.lr
    )
    assert (config.critic.value_loss_coef, config.critic.cliprange_value, config.algorithm.lam) == (0.5, 0.2, 0.95)
    assert "with a value head" in process_plan(config) and "alone in the first 5 rollout steps" in process_plan(config)


@pytest.mark.parametrize(
    "names", [("grpo_baseline.yaml", "dapo_qwen2.5_7b.yaml"), ("alfworld_grpo_3b.yaml", "alfworld_dapo_3b.yaml")]
)
def test_a_baseline_differs_from_its_recipe_by_the_algorithm_alone(names):
    baseline, dapo = map(recipe, names)
    assert not any(dapo_techniques(baseline).values()) and needs_reference(baseline)
    assert baseline.actor_rollout_ref.model == dapo.actor_rollout_ref.model
    assert baseline.actor_rollout_ref.rollout == dapo.actor_rollout_ref.rollout
    assert baseline.actor_rollout_ref.actor.optim == dapo.actor_rollout_ref.actor.optim
    assert baseline.actor_rollout_ref.actor.megatron == dapo.actor_rollout_ref.actor.megatron
    assert baseline.data.model_copy(update={"gen_batch_size": dapo.data.gen_batch_size}) == dapo.data
    assert baseline.reward == dapo.reward


def test_the_agent_recipe_has_the_published_agent_values_and_plays_alfworld():
    config = recipe("alfworld_dapo_3b.yaml")
    actor, shaping = config.actor_rollout_ref.actor, config.algorithm.dapo.overlong_reward_shaping
    assert (shaping.truncation_penalty, shaping.soft_penalty_mode, shaping.buffer_len) == (-0.3, "additive", 0)
    assert config.algorithm.dapo.dynamic_sampling.filter_mode == "strict"
    assert (effective_clip(config), actor.loss_agg_mode) == ((0.2, 0.28), "token-mean")
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    assert multi_turn.enable and multi_turn.environment == "alfworld" and config.reward.function == "environment"
