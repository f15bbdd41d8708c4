"""Writes the checkpoints of a run, one at a time: into a hidden folder, then the manifest, then the
rename.

A kill at any moment leaves every checkpoint that was there.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.checkpointing.folders import (
    discard,
    publish,
    retire,
    staging,
    write_controller_state,
    write_trainer_state,
)
from megatron_dapo.checkpointing.manifest import FileRecord, file_names, seal, write_manifest
from megatron_dapo.checkpointing.pending_save import PendingSave
from megatron_dapo.checkpointing.resume import CONTENTS
from megatron_dapo.config.schema.run import TrainerConfig
from megatron_dapo.platform.agreement import Agreement


@dataclass
class _Saving:
    """The checkpoint under way. tensors: of each model. sealing: this rank's checksums, when all
    tensors are there."""

    staged: Path
    final: Path
    tensors: Sequence[PendingSave]
    sealing: Future[dict[str, FileRecord]] | None = None


class Saver:
    """Every method is collective over all ranks; each rank brings its own part of the tensors."""

    def __init__(
        self,
        agreement: Agreement,
        write_tensors: Callable[[Path], Sequence[PendingSave]],
        trainer: TrainerConfig,
        contents: Sequence[str] = CONTENTS,
        on_published: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Begin nothing yet.

        Args:
            write_tensors: begins to write models, optimizers and random state into a checkpoint
                folder.
            trainer: has the keys keep_last and keep_every; see `folders.retire`.
            contents: the parts that the manifest names.
            on_published: called on rank 0 with each checkpoint in its place, before old ones are
                deleted; raises nothing.
        """
        self._on_published = on_published
        self._agreement = agreement
        self._write_tensors = write_tensors
        self._trainer = trainer
        self._contents = contents
        self._saving: _Saving | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint-checksums")

    def start(self, final: Path, trainer_state: dict[str, Any], controller_state: Callable[[], dict[str, Any]]) -> None:
        """Begin a checkpoint; one still being written is finished first.

        trainer_state and controller_state are used on rank 0. Raises JobError on all ranks.
        """
        self.finish()

        def prepare() -> Path:
            staged = staging(final)
            try:
                write_trainer_state(staged, trainer_state)
                write_controller_state(staged, controller_state())
            except Exception:
                discard(staged)
                raise
            return staged

        staged = self._agreement.leader(f"beginning {final}", prepare)
        with self._discarded_on_error(staged):
            self._saving = _Saving(staged, final, self._write_tensors(staged))

    def poll(self) -> None:
        """Continue as far as possible without waiting. Raises JobError on all ranks if a write
        failed since the last call."""
        saving = self._saving
        if saving is None:
            return
        if saving.sealing is None:
            if all([each.is_done() for each in saving.tensors]):  # of each, since it is collective
                saving.sealing = self._seal(saving)
        elif all(self._agreement.gather(saving.sealing.done())):
            self._publish(saving, saving.sealing)

    def finish(self) -> None:
        """Wait until the checkpoint under way is published. Raises JobError on all ranks."""
        if self._saving is not None:
            self._publish(self._saving, self._saving.sealing or self._seal(self._saving))

    def _seal(self, saving: _Saving) -> Future[dict[str, FileRecord]]:
        """Wait for the tensors; then each rank flushes its share of the files and computes their
        checksums, in the background."""
        with self._discarded_on_error(saving.staged):
            for each in saving.tensors:
                each.finish()
            names = self._agreement.leader(f"listing {saving.staged}", file_names, saving.staged)
        share = names[self._agreement.rank :: self._agreement.size]
        return self._thread.submit(seal, saving.staged, share)

    def _publish(self, saving: _Saving, sealing: Future[dict[str, FileRecord]]) -> None:
        """Wait for the checksums, and put the checkpoint in its place."""
        with self._discarded_on_error(saving.staged):
            parts = self._agreement.all(f"reading {saving.staged} again", sealing.result)
            files = {name: record for part in parts for name, record in part.items()}

            def put_in_place() -> None:
                write_manifest(saving.staged, self._contents, files)
                publish(saving.staged, saving.final)
                self._on_published(saving.final)
                retire(saving.final, self._trainer.keep_last, self._trainer.keep_every)

            self._agreement.leader(f"publishing {saving.final}", put_in_place)
        self._saving = None

    @contextmanager
    def _discarded_on_error(self, staged: Path) -> Iterator[None]:
        """Remove a failed checkpoint's partial files. If another process still writes into them,
        the next start deletes them; the error to report is the original one."""
        try:
            yield
        except Exception:
            self._saving = None
            if self._agreement.rank == 0:
                with suppress(OSError):
                    discard(staged)
            raise
