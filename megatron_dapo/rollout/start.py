"""Chooses where a run's batches come from."""

from megatron_dapo.config.derived import uses_experience_replay
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.spec_reader import read_vocab_size
from megatron_dapo.rollout.batch_replay import BatchReplay
from megatron_dapo.rollout.handle import RolloutHandle
from megatron_dapo.rollout.no_servers import NoServerRollout
from megatron_dapo.rollout.synthetic_batches import SyntheticBatches


def start_rollout(config: Config) -> RolloutHandle | NoServerRollout:
    """Return where the run's batches come from: dumped or synthetic ones, where the config says so, else a controller,
    which starts."""
    model = config.actor_rollout_ref.model.path
    if config.trainer.synthetic_batch:
        return SyntheticBatches(config, read_vocab_size(model))
    if config.trainer.replay:
        return BatchReplay(config.trainer.replay, read_vocab_size(model), uses_experience_replay(config))
    return RolloutHandle.start(config)
