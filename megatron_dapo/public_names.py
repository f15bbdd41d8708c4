"""The public names: `from megatron_dapo import NAME`. docs/api.md describes them, in this order.

Any other name may change in every version.
"""

SECTIONS: dict[str, dict[str, str]] = {
    "Runs": {
        "Run": "megatron_dapo.library.run",
        "Metrics": "megatron_dapo.library.run",
        "train": "megatron_dapo.library.start",
        "load_config": "megatron_dapo.config.loader",
        "UserError": "megatron_dapo.common.errors",
    },
    "Loss": {
        "fused_dapo_head": "megatron_dapo.kernels.fused_head",
        "Head": "megatron_dapo.kernels.fused_head",
        "HeadLoss": "megatron_dapo.kernels.fused_head",
        "RowPlan": "megatron_dapo.kernels.row_plan",
        "head_log_probs": "megatron_dapo.kernels.fused_head",
        "linear_logprob_entropy": "megatron_dapo.kernels.linear_logprob",
        "dapo_loss": "megatron_dapo.algorithms.dapo_loss",
        "metric_names": "megatron_dapo.algorithms.dapo_loss",
        "LossConfig": "megatron_dapo.algorithms.dapo_loss",
        "Clip": "megatron_dapo.algorithms.policy_loss",
        "LossSums": "megatron_dapo.algorithms.policy_loss",
        "TokenOutputs": "megatron_dapo.algorithms.dapo_loss",
        "TokenBatch": "megatron_dapo.algorithms.dapo_loss",
        "token_weights": "megatron_dapo.algorithms.aggregation",
        "grpo": "megatron_dapo.algorithms.estimators",
        "GroupRewards": "megatron_dapo.algorithms.estimators",
    },
    "Packing": {
        "TrainSample": "megatron_dapo.data.batching",
        "CostModel": "megatron_dapo.data.batching",
        "schedule": "megatron_dapo.data.packing",
        "collate": "megatron_dapo.data.packing",
        "MicroBatch": "megatron_dapo.data.packing",
    },
    "Scores": {
        "pass_at_k": "megatron_dapo.algorithms.answer_metrics",
        "majority": "megatron_dapo.algorithms.answer_metrics",
        "scores": "megatron_dapo.algorithms.answer_metrics",
        "estimates": "megatron_dapo.algorithms.answer_metrics",
        "Estimate": "megatron_dapo.algorithms.answer_metrics",
    },
    "Rewards": {
        "score_response": "megatron_dapo.rewards.reward_registry",
        "RewardResult": "megatron_dapo.rewards.reward_result",
    },
    "Conversion": {
        "convert_to_megatron": "megatron_dapo.library.conversion",
        "convert_to_huggingface": "megatron_dapo.library.conversion",
    },
}
PUBLIC: dict[str, str] = {name: module for names in SECTIONS.values() for name, module in names.items()}
"""Name -> the module that defines it."""
