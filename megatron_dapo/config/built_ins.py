"""What `reward.function` and `multi_turn.environment` know by name, and where it lives: imported only where it runs."""

import re

BY_DATA_SOURCE = "by_data_source"
BUILT_IN_REWARDS = {
    "math_dapo": "megatron_dapo.rewards.text:math_dapo",
    "math_verify": "megatron_dapo.rewards.symbolic:math_verify",
    "exact_match": "megatron_dapo.rewards.text:exact_match",
    "reasoning_gym": "megatron_dapo.rewards.reasoning_gym_reward:reasoning_gym",
    "code_tests": "megatron_dapo.rewards.code.reward:code_tests",
    "environment": "megatron_dapo.rewards.text:environment",
    "none": "megatron_dapo.rewards.text:none",
}
BUILT_IN_ENVIRONMENTS = {
    "reasoning_gym": "megatron_dapo.envs.reasoning_gym:ReasoningGym",
}
IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""`package.module:function` or `package.module:Class`."""
