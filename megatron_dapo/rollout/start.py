"""Chooses the source of a run's batches."""

from megatron_dapo.config.derived import uses_experience_replay
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.spec_reader import read_vocab_size
from megatron_dapo.rollout.batch_replay import BatchReplay
from megatron_dapo.rollout.batch_source import BatchSource
from megatron_dapo.rollout.handle import RolloutHandle
from megatron_dapo.rollout.synthetic_batches import SyntheticBatches


def start_rollout(config: Config) -> BatchSource:
    """Return dumped or synthetic batches if the config asks for them; else start a controller."""
    model = config.actor_rollout_ref.model.path
    if config.trainer.synthetic_batch:
        return SyntheticBatches(config, read_vocab_size(model))
    if config.trainer.replay:
        return BatchReplay(config.trainer.replay, read_vocab_size(model), uses_experience_replay(config))
    return RolloutHandle.start(config)
