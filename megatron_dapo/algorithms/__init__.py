"""Pure tensor functions of the algorithm: advantages, losses, aggregation, KL, metric sums.

No Megatron, no I/O, no config objects. Import from here.
"""

from megatron_dapo.algorithms.advantages import GROUP_ESTIMATORS, GroupRewards, group_advantages, rloo_advantages
from megatron_dapo.algorithms.aggregation import AGGREGATIONS, token_weights
from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss, metric_names
from megatron_dapo.algorithms.gae import TOKEN_ESTIMATORS, TokenRewards, gae, last_counted
from megatron_dapo.algorithms.kl import (
    FULL_KL,
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
from megatron_dapo.algorithms.mismatch import MEAN_MISMATCH, mismatch_sums, truncated_importance
from megatron_dapo.algorithms.policy_loss import (
    OFF_POLICY_LOSSES,
    OFF_POLICY_SUMS,
    Clip,
    LossSums,
    OffPolicy,
    policy_loss,
)
from megatron_dapo.algorithms.value_loss import (
    EXPLAINED_VARIANCE_SUMS,
    VALUE_LOSSES,
    VALUE_SUMS,
    explained_variance_sums,
    value_loss,
)
from megatron_dapo.algorithms.whitening import mean_and_variance, moments, whiten

__all__ = [
    "MEAN_MISMATCH",
    "AGGREGATIONS",
    "EXPLAINED_VARIANCE_SUMS",
    "FULL_KL",
    "GROUP_ESTIMATORS",
    "KL_CONTROLLERS",
    "KL_PENALTIES",
    "OFF_POLICY_LOSSES",
    "OFF_POLICY_SUMS",
    "TOKEN_ESTIMATORS",
    "VALUE_LOSSES",
    "VALUE_SUMS",
    "AdaptiveKLController",
    "Clip",
    "FixedKLController",
    "GroupRewards",
    "LossConfig",
    "LossSums",
    "Maxima",
    "OffPolicy",
    "Sums",
    "TokenBatch",
    "TokenOutputs",
    "TokenRewards",
    "add_sums",
    "dapo_loss",
    "explained_variance_sums",
    "finalize",
    "gae",
    "group_advantages",
    "kl_penalty",
    "last_counted",
    "mean_and_variance",
    "merge_maxima",
    "metric_names",
    "mismatch_sums",
    "moments",
    "policy_loss",
    "rloo_advantages",
    "stack_maxima",
    "stack_sums",
    "token_weights",
    "truncated_importance",
    "unstack_maxima",
    "unstack_sums",
    "value_loss",
    "whiten",
]
