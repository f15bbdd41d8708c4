"""Training on dumped batches again, without servers (`trainer.replay`).

It reproduces bugs and compares layouts. Not to be confused with experience replay
(experience_replay.py): there groups of a run borrow right responses of its earlier steps.
"""

from collections.abc import Callable
from pathlib import Path

from megatron_dapo.common.errors import UserError
from megatron_dapo.data.samples import RolloutBatch
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.rollout.batch_source import NoServerRollout, never
from megatron_dapo.rollout.token_checks import find_sample_fault
from megatron_dapo.storage.run_folder import batch_file


class BatchReplay(NoServerRollout):
    """Dumped batches in place of a controller and its servers."""

    def __init__(self, folder: str | Path, vocab_size: int, takes_experiences: bool = False) -> None:
        """Prepare; no batch is read yet.

        takes_experiences: the loss handles samples of the dumped run's experience replay.
        """
        super().__init__(str(folder))
        self._folder = Path(folder)
        self._vocab_size = vocab_size
        self._takes_experiences = takes_experiences

    def next_batch(self, step: int, weight_version: int, is_to_stop: Callable[[], bool] = never) -> RolloutBatch:
        """Return the step's groups and metrics as they were dumped.

        Tokens keep the versions of the weights that wrote them. Raises UserError for a missing,
        damaged or impossible batch.
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
