"""Forward and backward over packed micro-batches: the policy, the reference, the optimizer, a rank's share of a step.

Import from here what __all__ lists.
"""

from megatron_dapo.platform import prepare_megatron

prepare_megatron()  # everything below imports megatron.core, which must not come first

from megatron_dapo.training.advantages import estimate_advantages  # noqa: E402
from megatron_dapo.training.critic import Critic  # noqa: E402
from megatron_dapo.training.distribute import StepDistributor, StepShard  # noqa: E402
from megatron_dapo.training.in_use import in_use  # noqa: E402
from megatron_dapo.training.policy import Policy  # noqa: E402
from megatron_dapo.training.reference import Reference  # noqa: E402

__all__ = ["Critic", "Policy", "Reference", "StepDistributor", "StepShard", "estimate_advantages", "in_use"]
