"""Pure tensor functions of the algorithm: advantages, losses, aggregation, KL, shaping, filters, metric sums.

No Megatron, no I/O, no config objects. Import from here.
"""

from megatron_dapo.algorithms.advantages import group_advantages
from megatron_dapo.algorithms.aggregation import AGGREGATIONS, token_weights
from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss, metric_names
from megatron_dapo.algorithms.filters import FILTER_MODES
from megatron_dapo.algorithms.kl import (
    KL_CONTROLLERS,
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    kl_penalty,
)
from megatron_dapo.algorithms.metrics import (
    Maxima,
    Sums,
    add_sums,
    finalize,
    merge_maxima,
    stack_maxima,
    stack_sums,
    unstack_maxima,
    unstack_sums,
)
from megatron_dapo.algorithms.mismatch import mismatch_sums, truncated_importance
from megatron_dapo.algorithms.policy_loss import OFF_POLICY_LOSSES, Clip, LossSums, OffPolicy, policy_loss
from megatron_dapo.algorithms.reward_shaping import TRUNCATION_MODES, OverlongShaping, overlong_penalty, shape

__all__ = [
    "AGGREGATIONS",
    "FILTER_MODES",
    "KL_CONTROLLERS",
    "KL_PENALTIES",
    "OFF_POLICY_LOSSES",
    "TRUNCATION_MODES",
    "AdaptiveKLController",
    "Clip",
    "FixedKLController",
    "LossConfig",
    "LossSums",
    "Maxima",
    "OffPolicy",
    "OverlongShaping",
    "Sums",
    "TokenBatch",
    "TokenOutputs",
    "add_sums",
    "dapo_loss",
    "finalize",
    "group_advantages",
    "kl_penalty",
    "merge_maxima",
    "metric_names",
    "mismatch_sums",
    "overlong_penalty",
    "policy_loss",
    "shape",
    "stack_maxima",
    "stack_sums",
    "token_weights",
    "truncated_importance",
    "unstack_maxima",
    "unstack_sums",
]
