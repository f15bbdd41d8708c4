"""Section `exp_manager`: trajectories of earlier rollout steps for experience replay."""

from megatron_dapo.config.schema.base import Fraction, PositiveInt, Section
from megatron_dapo.config.schema.rules import WhileEnabled


class ExperienceReplayConfig(Section):
    enable: bool = False
    """Replay correct trajectories of earlier steps: one in each replayed group; see docs/experience_replay.md."""
    replay_start_ratio: WhileEnabled[Fraction] = 0.35
    """Share of right responses in a rollout step with which replay begins, for good (arXiv 2510.02245 has 0.35)."""
    exp_ratio: WhileEnabled[Fraction] = 0.5
    """Share of a gen batch's prompts that are replayed ones: one recorded trajectory and n - 1 new responses."""
    max_trajectories_per_task: WhileEnabled[PositiveInt] = 10
    """Trajectories kept per prompt, the newest."""
    max_pool_tokens: WhileEnabled[PositiveInt] = 4194304
    """Tokens of all prompts and responses kept, about 100 bytes of memory each; beyond it the oldest are dropped."""


class ExpManagerConfig(Section):
    experience_replay: ExperienceReplayConfig = ExperienceReplayConfig()
