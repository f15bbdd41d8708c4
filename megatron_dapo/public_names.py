"""The public names: `from megatron_dapo import NAME`. docs/api.md describes them, in this order."""

SECTIONS: dict[str, dict[str, str]] = {
    "Runs": {
        "megatron_dapo.library.run": "Run Metrics",
        "megatron_dapo.library.start": "train",
        "megatron_dapo.config.loader": "load_config",
        "megatron_dapo.common.errors": "UserError",
    },
    "Loss": {
        "megatron_dapo.kernels.fused_head": "fused_dapo_head Head HeadLoss head_log_probs",
        "megatron_dapo.kernels.row_plan": "RowPlan",
        "megatron_dapo.kernels.linear_logprob": "linear_logprob_entropy",
        "megatron_dapo.algorithms.dapo_loss": "dapo_loss LossConfig TokenBatch TokenOutputs metric_names",
        "megatron_dapo.algorithms.policy_loss": "Clip LossSums",
        "megatron_dapo.algorithms.aggregation": "token_weights",
        "megatron_dapo.algorithms.estimators": "grpo GroupRewards",
    },
    "Packing": {
        "megatron_dapo.data.packing": "schedule collate MicroBatch",
        "megatron_dapo.data.batching": "TrainSample CostModel",
    },
    "Scores": {"megatron_dapo.algorithms.answer_metrics": "pass_at_k majority scores"},
    "Rewards": {
        "megatron_dapo.rewards.reward_registry": "score_response",
        "megatron_dapo.rewards.reward_result": "RewardResult",
    },
    "Conversion": {"megatron_dapo.library.conversion": "convert_to_megatron convert_to_huggingface"},
}
PUBLIC = {name: module for modules in SECTIONS.values() for module, names in modules.items() for name in names.split()}
"""Name -> the module that defines it."""
