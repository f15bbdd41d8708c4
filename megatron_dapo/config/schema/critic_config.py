"""Section `critic`: the model of the values for `algorithm.adv_estimator: gae`. Parallel sizes and
dtype are the actor's."""

from typing import Literal

from megatron_dapo.config.schema.actor_rollout_ref import OptimConfig
from megatron_dapo.config.schema.base import PositiveFloat, PositiveInt, Section
from megatron_dapo.config.schema.rules import MayChangeOnResume


class CriticModelConfig(Section):
    path: str | None = None
    """Checkpoint that the critic starts from, of either kind; null = the actor's. A policy lends its body; the value
    head starts at 0, unless the checkpoint is a critic's."""


class CriticOptimConfig(OptimConfig):
    lr: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""


class CriticConfig(Section):
    model: CriticModelConfig = CriticModelConfig()
    ppo_mini_batch_size: PositiveInt | None = None
    """Groups per optimizer step of the critic; divides `data.train_batch_size`; null = the actor's."""
    ppo_epochs: PositiveInt | None = None
    """Passes of the critic over each rollout step's samples; null = the actor's."""
    max_tokens_per_microbatch: MayChangeOnResume[PositiveInt | None] = None
    """Hard cap on the packed tokens of one of the critic's micro-batches; null = the actor's."""
    value_loss_coef: PositiveFloat = 0.5
    """Factor of the value loss. Adam's steps do not depend on it, what `optim.clip_grad` cuts does."""
    cliprange_value: PositiveFloat | None = 0.2
    """How far a value may move from that before the update until its loss no longer falls; null = no clipping."""
    loss_type: Literal["l2", "huber"] = "l2"
    """Value loss: (V - R)^2, or Huber's with delta 1."""
    optim: CriticOptimConfig = CriticOptimConfig()
