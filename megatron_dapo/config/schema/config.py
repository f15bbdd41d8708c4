"""The config tree: every key, its type, default and meaning. These files are the reference manual.

`python -m megatron_dapo config-reference` prints a field's docstring. Types and ranges of single
keys live here; checks of several keys together live in `megatron_dapo/checks`.
"""

from typing import Annotated

from megatron_dapo.config.built_ins import estimators_with
from megatron_dapo.config.schema.actor_rollout_ref import ActorRolloutRefConfig
from megatron_dapo.config.schema.algorithm import AlgorithmConfig
from megatron_dapo.config.schema.base import Section
from megatron_dapo.config.schema.critic_config import CriticConfig
from megatron_dapo.config.schema.exp_manager import ExpManagerConfig
from megatron_dapo.config.schema.rules import ActsIf, Is, MayChangeOnResume
from megatron_dapo.config.schema.run import DataConfig, RewardConfig, TrainerConfig, WeightSyncConfig
from megatron_dapo.config.schema.sft_config import SftConfig


class Config(Section):
    """The whole tree."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: Annotated[CriticConfig, ActsIf(Is("algorithm.adv_estimator", *estimators_with(needs_critic=True)))] = (
        CriticConfig()
    )
    algorithm: AlgorithmConfig = AlgorithmConfig()
    exp_manager: ExpManagerConfig = ExpManagerConfig()
    reward: RewardConfig = RewardConfig()
    weight_sync: MayChangeOnResume[WeightSyncConfig] = WeightSyncConfig()
    sft: SftConfig = SftConfig()
    trainer: TrainerConfig = TrainerConfig()
