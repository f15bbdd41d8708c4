"""The config tree: every key, its type, its default and what it means. These files are the reference manual.

A field's docstring is printed by `python -m megatron_dapo config-reference`. Types and ranges of single keys live here;
checks of several keys together live in `validation.py`.
"""

from megatron_dapo.config.schema.actor_rollout_ref import (
    ActorConfig,
    ActorRolloutRefConfig,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    RefConfig,
    RolloutConfig,
    ServerConfig,
)
from megatron_dapo.config.schema.algorithm import (
    AlgorithmConfig,
    DapoConfig,
    DynamicSamplingConfig,
    FilterGroupsConfig,
    KLControlConfig,
    OverlongRewardShapingConfig,
    RolloutCorrectionConfig,
)
from megatron_dapo.config.schema.base import Section
from megatron_dapo.config.schema.critic import CriticConfig, CriticModelConfig, CriticOptimConfig
from megatron_dapo.config.schema.exp_manager import ExperienceReplayConfig, ExpManagerConfig
from megatron_dapo.config.schema.multi_turn import MultiTurnConfig
from megatron_dapo.config.schema.run import DataConfig, RewardConfig, TrainerConfig, WeightSyncConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "CriticModelConfig",
    "CriticOptimConfig",
    "DapoConfig",
    "DataConfig",
    "DynamicSamplingConfig",
    "ExpManagerConfig",
    "ExperienceReplayConfig",
    "FilterGroupsConfig",
    "KLControlConfig",
    "MegatronConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "OverlongRewardShapingConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "Section",
    "ServerConfig",
    "TrainerConfig",
    "WeightSyncConfig",
]


class Config(Section):
    """The whole tree."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    exp_manager: ExpManagerConfig = ExpManagerConfig()
    reward: RewardConfig = RewardConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    trainer: TrainerConfig = TrainerConfig()
