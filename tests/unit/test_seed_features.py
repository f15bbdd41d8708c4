"""Every feature named in the documents, with its tests; test_seeds.py lists the documents.

A row is a feature by its document and heading. A renamed or removed test fails here.
"""

import ast
from functools import cache

import pytest

from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

FEATURES = {
    # 000: DAPO in a training system
    "000 Clip-Higher": [
        "unit/test_algorithms_loss.py::test_every_branch_of_the_clip_by_hand",
        "unit/test_seed_options.py::test_clipping_and_the_entropy_bonus",
    ],
    "000 Dynamic Sampling: groups without signal get advantages of 0 and keep their places": [
        "unit/test_group_filter.py::test_masked_groups_stay_in_their_places_and_are_counted_as_filtered",
        "unit/test_group_filter.py::test_the_advantages_of_a_masked_group_are_0_and_its_tokens_still_count",
    ],
    "000 Dynamic Sampling: strict and relaxed filters": [
        "unit/test_algorithms_rewards.py::test_filters_name_the_reason_or_keep",
        "unit/test_seed_options.py::test_the_filter_of_groups",
    ],
    "000 Token-Level Policy Gradient Loss": [
        "unit/test_algorithms_loss.py::test_weights_and_counts_by_hand",
        "unit/test_seed_options.py::test_the_aggregation_of_token_losses",
    ],
    "000 Overlong Reward Shaping: modes of a truncation penalty": [
        "unit/test_algorithms_rewards.py::test_every_truncation_mode_by_hand",
        "unit/test_seed_options.py::test_the_four_modes_of_truncation_penalty",
    ],
    "000 Overlong Reward Shaping: the soft interval": [
        "unit/test_algorithms_rewards.py::test_the_soft_punishment_is_linear_in_the_buffer_and_constant_beyond",
    ],
    "000 the complete configuration and its tables": [
        "unit/test_seeds.py::test_a_block_loads_as_it_is_says_what_it_says_and_makes_sense",
        "unit/test_seeds.py::test_an_option_of_the_tables_has_its_type_and_default",
    ],
    "000 the three ways to switch DAPO on, whole or in parts": [
        "unit/test_seeds.py::test_the_check_list_is_a_config_with_everything_on_and_so_is_the_recipe_of_way_one",
        "unit/test_seeds.py::test_by_default_everything_of_dapo_is_off_and_the_clip_is_plain",
    ],
    "000 metrics of dynamic sampling, shaping and clipping": [
        "unit/test_seeds.py::test_every_metric_of_the_documents_is_in_metrics_jsonl_with_the_value_worked_out_by_hand",
    ],
    "000 several turns: only the model's tokens count in the loss": [
        "e2e/test_multi_turn.py::test_masks_and_turn_counts_token_by_token",
        "e2e/test_multi_turn.py::test_the_trainer_learns_from_the_models_tokens_only",
    ],
    "000 several turns: groups are filtered by the reward of trajectories": [
        "unit/test_sampling.py::test_a_multi_turn_step_token_by_token_metric_by_metric",
    ],
    "000 several turns: truncated by length, or because it did not end": [
        "unit/test_dynamic_sampling.py::test_truncation_counts_and_penalties",
        "unit/test_sampling.py::test_limits_of_the_config_reach_the_trajectories",
    ],
    "000 GRPO stays as it is without DAPO": [
        "unit/test_algorithms_rewards.py::test_advantages_equal_the_formula_and_sum_to_zero",
        "unit/test_seeds.py::test_by_default_everything_of_dapo_is_off_and_the_clip_is_plain",
    ],
    "000 experience replay: which trajectories come back, and when": [
        "unit/test_experience_replay.py::test_of_a_prompt_the_trajectory_of_least_entropy_is_replayed",
        "unit/test_seed_options.py::test_when_replay_begins_and_how_much_of_a_gen_batch_of_four_it_is",
        "e2e/test_experience_replay.py::test_half_of_the_groups_borrow_a_trajectory_as_it_was_written",
    ],
    "000 experience replay: the loss of off-policy tokens, joined with that of the others": [
        "unit/test_seed_options.py::test_the_loss_of_replayed_tokens",
        "unit/test_seeds.py::test_purely_on_policy_the_loss_of_replayed_tokens_is_0_and_none_is_replayed",
    ],
    "000 experience replay: modes exgrpo_policy_shaping and dapo_clip_higher": [
        "unit/test_off_policy_loss.py::test_a_replayed_token_is_shaped_and_not_clipped",
        "unit/test_off_policy_loss.py::test_a_replayed_token_may_be_clipped_with_an_upper_bound_of_its_own",
    ],
    "000 experience replay: clip-higher acts on the policy's own tokens alone": [
        "unit/test_off_policy_loss.py::test_on_policy_tokens_keep_their_loss_and_their_metrics",
    ],
    "000 experience replay: a trajectory keeps is_terminated, by which it is punished": [
        "unit/test_experience_replay.py::test_a_trajectory_comes_back_as_it_was_recorded",
        "unit/test_replayed_groups.py::test_dumped_batches_keep_which_samples_were_replayed",
    ],
    "000 experience replay and dynamic sampling: tasks A and B": [
        "unit/test_seeds.py::test_the_two_examples_of_replay_one_borrowed_success_saves_group_a_and_group_b_is_filtered",
    ],
    "000 experience replay: old log-probs are the recorded ones": [
        "unit/test_replayed_groups.py::test_old_log_probs_of_a_replayed_sample_are_the_recorded_ones",
    ],
    "000 recommended configurations, for mathematics and for agents": [
        "unit/test_recipes.py::test_a_dapo_recipe_has_all_four_techniques_on_and_its_model_is_checked",
        "unit/test_text_games_example.py",
    ],
    "000 the whole flow, and the check list": [
        "e2e/test_program.py::test_the_resolved_config_has_all_four_techniques_and_both_parallelisms",
        "unit/test_group_filter.py::test_the_controller_masks_and_says_how_many_samples_were_filtered",
    ],
    # 001: DAPO
    "001 1.1 decoupled clip": [
        "unit/test_algorithms_loss.py::test_policy_loss_and_gradient_equal_the_reference_formula"
    ],
    "001 1.2 groups are filtered by a metric without spread": [
        "unit/test_group_filter.py::test_a_group_is_dropped_where_its_metric_has_no_spread",
    ],
    "001 1.2 sampled again until the batch is full, up to max_num_gen_batches": [
        "unit/test_group_filter.py::test_filter_groups_samples_again_until_the_batch_is_full_and_counts_its_reason",
        "unit/test_group_filter.py::test_filter_groups_stops_at_its_limit_and_never_where_the_limit_is_not_positive",
    ],
    "001 1.3 modes of aggregation": ["unit/test_algorithms_loss.py::test_weights_and_counts_by_hand"],
    "001 1.4 linear punishment of length": [
        "unit/test_algorithms_rewards.py::test_the_soft_punishment_is_the_documents_formula_and_ends_at_the_factor",
    ],
    "001 2 the batch is cut to its size, surplus is not kept": [
        "unit/test_dynamic_sampling.py::test_kept_filtered_and_surplus_are_counted_exactly",
        "unit/test_dynamic_sampling.py::test_a_step_is_trained_on_what_its_own_weights_wrote",
    ],
    "001 2 old and reference log-probs, advantages, then several optimizer steps": [
        "distributed/test_parity.py",
        "e2e/test_program.py::test_every_step_took_two_optimizer_steps_on_the_newest_weights",
    ],
    # 002: PPO for classic control
    "002 the config's fields and defaults": [
        "unit/test_classic_control.py::test_the_config_has_the_seeds_fields_and_defaults_and_does_not_change",
    ],
    "002 actor, critic and shared networks": [
        "unit/test_classic_control.py::test_every_method_has_the_seeds_shapes",
        "unit/test_classic_control.py::test_with_a_shared_backbone_both_heads_move_the_same_layers",
    ],
    "002 GAE": ["unit/test_algorithms_gae.py::test_one_recursion_gives_what_both_seeds_give"],
    "002 clipped policy loss and clipped value loss": [
        "unit/test_classic_control.py::test_the_metrics_of_an_update_are_those_worked_out_by_hand",
        "unit/test_value_loss.py::test_every_branch_by_hand",
    ],
    "002 state containers, and everything from a seed": [
        "unit/test_classic_control.py::test_a_state_is_a_value_and_everything_follows_from_the_seed",
    ],
    "002 training on CartPole, in parallel environments": ["e2e/test_classic_control.py"],
    "002 the optimizer: Adam behind a clipped norm of the gradient": [
        "unit/test_classic_control.py::test_the_optimizer_is_adam_with_the_seeds_eps_behind_a_clipped_gradient",
    ],
    "002 a custom configuration": [
        "unit/test_classic_control.py::test_the_config_has_the_seeds_fields_and_defaults_and_does_not_change",
    ],
    "002 API: the agent's methods": [
        "unit/test_classic_control.py::test_every_method_has_the_seeds_shapes",
        "unit/test_seeds.py::test_the_agent_for_classic_control_has_its_options_methods_and_metrics",
    ],
    "002 metrics": ["unit/test_seeds.py::test_the_agent_for_classic_control_has_its_options_methods_and_metrics"],
    # 003: PPO for language models
    "003 1.2 an actor that is a language model": ["e2e/test_ppo.py"],
    "003 1.2 a critic for GAE": ["distributed/test_critic.py"],
    "003 1.2 a reference model against drift": [
        "unit/test_seed_options.py::test_the_kl_in_the_loss",
        "unit/test_seed_options.py::test_the_kl_in_the_reward",
    ],
    "003 1.2 and 8.1 a reward model scores responses": [
        "unit/test_reward_model.py",
        "unit/test_reward_model_kills.py",
        "e2e/test_reward_model_server.py",
    ],
    "003 2 GAE with masks, whitened": [
        "unit/test_algorithms_gae.py::test_the_advantages_are_those_of_the_definition_for_any_mask_and_any_episodes",
        "unit/test_algorithms_gae.py::test_whitening_is_by_the_counted_values_of_all_pieces_together",
    ],
    "003 1.1 and 3 the clipped objective": [
        "unit/test_algorithms_loss.py::test_policy_loss_and_gradient_equal_the_reference_formula",
    ],
    "003 3.2 the ratio, clamped, and the KL that is watched": [
        "unit/test_algorithms_loss.py::test_the_log_ratio_is_clamped_and_has_no_gradient_beyond",
    ],
    "003 3.3 dual clip": [
        "unit/test_algorithms_loss.py::test_every_token_has_the_loss_of_its_case_for_any_mask_sign_and_ratio",
    ],
    "003 3.4 asymmetric clip": ["unit/test_seed_options.py::test_clipping_and_the_entropy_bonus"],
    "003 4 four modes of aggregation": ["unit/test_algorithms_loss.py::test_the_four_modes_are_those_of_the_config"],
    "003 5 value loss: squared or Huber, clipped": [
        "unit/test_value_loss.py::test_the_loss_is_the_larger_of_both_branches_summed_by_weight",
        "unit/test_value_loss.py::test_huber_is_huber_in_the_clipped_branch_too",
    ],
    "003 6.1 KL penalties: kl, abs, mse, low_var_kl": [
        "unit/test_algorithms_rewards.py::test_every_kl_estimator_by_hand",
    ],
    "003 6.1 KL penalty: full": [
        "unit/test_full_kl.py::test_number_and_gradient_are_those_of_kl_div_on_all_logits",
        "distributed/test_full_kl.py",
    ],
    "003 6.2 and 6.3 fixed and adaptive KL controllers": [
        "unit/test_algorithms_rewards.py::test_a_fixed_coefficient_stays",
        "unit/test_algorithms_rewards.py::test_an_adaptive_coefficient_follows_the_clipped_error",
    ],
    "003 6.4 the block of the KL controller": ["unit/test_seeds.py::test_the_block_of_the_kl_controller_acts"],
    "003 7 entropy bonus, and the whole loss": [
        "unit/test_algorithms_loss.py::test_the_whole_loss_is_policy_plus_kl_minus_entropy",
    ],
    "003 8 the whole PPO step": [
        "e2e/test_ppo.py::test_the_reward_climbs_and_the_held_out_accuracy_doubles",
        "e2e/test_ppo.py::test_the_value_loss_falls_and_the_values_explain_the_returns",
    ],
    "003 8.2 the configuration": [
        "unit/test_seeds.py::test_the_block_of_ppo_has_a_critic_and_clips_on_both_sides_alike",
    ],
    # 004: the DAPO paper
    "004 GRPO's advantages, without a value function": [
        "unit/test_algorithms_rewards.py::test_advantages_equal_the_formula_and_sum_to_zero",
    ],
    "004 no KL term": ["unit/test_seeds.py::test_by_default_everything_of_dapo_is_off_and_the_clip_is_plain"],
    "004 rule-based rewards of +1 and -1": ["unit/test_rewards.py::test_math_dapo_follows_the_minerva_rule"],
    "004 rewards for code": ["unit/test_code_tests.py"],
    "004 rule-based rewards of other kinds, such as proofs: a function of one's own": [
        "unit/test_rewards_pool.py",
        "unit/test_reward_forms.py",
    ],
    "004 the published data set": [
        "unit/test_prompts.py::test_verl_rows_become_prompts",
        "unit/test_prompts.py::test_rows_with_equal_content_are_one_prompt_whatever_their_index",
    ],
    "004 the loss of GRPO, by sample": [
        "unit/test_algorithms_loss.py::test_the_four_modes_are_those_of_the_config",
    ],
    "004 clip-higher": ["unit/test_seed_options.py::test_clipping_and_the_entropy_bonus"],
    "004 oversampling until the batch is full": [
        "unit/test_dynamic_sampling.py::test_kept_filtered_and_surplus_are_counted_exactly",
    ],
    "004 token-level loss": ["unit/test_algorithms_loss.py::test_weights_and_counts_by_hand"],
    "004 overlong filtering: truncated samples have no loss": [
        "unit/test_batching.py::test_truncated_responses_lose_their_loss_but_stay_in_the_statistics",
    ],
    "004 soft overlong punishment": [
        "unit/test_algorithms_rewards.py::test_the_soft_punishment_is_linear_in_the_buffer_and_constant_beyond",
    ],
    "004 the published run's recipe": [
        "unit/test_recipes.py::test_the_reference_runs_recipes_have_its_published_values",
    ],
}


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((REPOSITORY / "tests" / file).read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_of_the_documents_has_tests_that_are_there(feature):
    assert FEATURES[feature]
    for test in FEATURES[feature]:
        file, _, name = test.partition("::")
        assert names_in(file), f"{file} has no tests"
        assert not name or name in names_in(file), f"{test} is not there"


def test_every_document_is_in_the_table():
    assert {feature.partition(" ")[0] for feature in FEATURES} == {"000", "001", "002", "003", "004"}
