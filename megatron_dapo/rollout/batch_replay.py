"""Training on dumped batches again, without servers (`trainer.replay`): bugs reproduced, layouts compared.

Not to be confused with experience replay (experience_replay.py), where groups of a run borrow right responses of its
earlier steps.
"""

from collections.abc import Callable
from pathlib import Path

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import uses_experience_replay
from megatron_dapo.config.schema import Config
from megatron_dapo.data.types import RolloutBatch
from megatron_dapo.huggingface.model_spec import read_vocab_size
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.rollout.handle import RolloutHandle
from megatron_dapo.rollout.token_checks import find_sample_fault
from megatron_dapo.storage.run_folder import batch_file


def start_rollout(config: Config) -> "RolloutHandle | BatchReplay":
    """Return where the run's batches come from: dumped ones with `trainer.replay`, else a controller, which starts."""
    folder = config.trainer.replay
    if not folder:
        return RolloutHandle.start(config)
    return BatchReplay(folder, read_vocab_size(config.actor_rollout_ref.model.path), uses_experience_replay(config))


class BatchReplay:
    """Dumped batches in place of a controller and its servers: the calls of RolloutHandle.

    A batch is found by its step, so a run that resumes at step 4 takes those of 4 and later, and there is no state.
    takes_experiences: whether the loss knows what to do with samples that had been replayed in the dumped run.
    """

    def __init__(self, folder: str | Path, vocab_size: int, takes_experiences: bool = False) -> None:
        self._folder = Path(folder)
        self._vocab_size = vocab_size
        self._takes_experiences = takes_experiences

    def wait_ready(self) -> None:
        """Return at once: nothing has to start."""

    def next_batch(
        self, step: int, weight_version: int, is_to_stop: Callable[[], bool] = lambda: False
    ) -> RolloutBatch:
        """Return the step's groups and metrics as they were dumped.

        Raises UserError for a batch that is missing, damaged or impossible.

        weight_version: not used; the tokens keep the versions of the weights that wrote them. Nor is is_to_stop: it
        takes no time.
        """
        batch = read_batch(self._folder, step)
        self._check(batch, step)
        if not self._takes_experiences and any(sample.exp_mask for group in batch.groups for sample in group.samples):
            raise UserError(
                f"Batch {batch_file(self._folder, step)} has samples of the dumped run's experience replay, which have "
                f"a loss of their own; set exp_manager.experience_replay.enable to true, as it was there."
            )
        return batch

    def _check(self, batch: RolloutBatch, step: int) -> None:
        """Raise UserError for the first sample with numbers that no server can have given."""
        for group in batch.groups:
            for number, sample in enumerate(group.samples, 1):
                if fault := find_sample_fault(sample, self._vocab_size):
                    raise UserError(
                        f"Batch {batch_file(self._folder, step)}, group {group.uid}, sample {number} {fault}; dump it "
                        f"again, with the model of actor_rollout_ref.model.path, or replay other batches."
                    )

    def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        """Return {}: held-out prompts need a server."""
        return {}

    def refuse_batch(self) -> None:
        """Do nothing: a resumed run reads the batch again in any case."""

    def halt(self) -> None:
        """Do nothing: nothing is under way."""

    def state_dict(self) -> dict:
        """Return which batches are trained on again."""
        return {"replay": str(self._folder)}

    def load_state_dict(self, state: dict) -> None:
        """Do nothing, whatever rollout wrote the state: a replay goes on with the batch of the next step."""

    def dump_stacks(self) -> None:
        """Do nothing: there is no process that could hang."""

    def close(self) -> None:
        """Do nothing: nothing is open."""
