"""Writes the checkpoints of a run, one at a time: into a hidden folder, then the manifest, then the rename.

A kill at any moment leaves every checkpoint that was there. Who writes the tensors is given.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatron_dapo.checkpointing.folders import (
    discard,
    publish,
    retire,
    staging,
    write_controller_state,
    write_trainer_state,
)
from megatron_dapo.checkpointing.manifest import FileRecord, file_names, seal, write_manifest
from megatron_dapo.checkpointing.resume import CONTENTS
from megatron_dapo.platform.agreement import Agreement


class Pending(Protocol):
    """Tensors that are being written. Both calls are collective; finish raises on every rank where one failed."""

    def is_done(self) -> bool: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay; see `folders.retire`."""

    keep_last: int | None = None
    keep_every: int | None = None


@dataclass
class _Saving:
    """The checkpoint under way. sealing: this rank's share of the checksums, when all tensors are there."""

    staged: Path
    final: Path
    pending: Pending
    sealing: Future | None = field(default=None)


class Saver:
    """Every method is collective over all ranks; each rank brings its own part of the tensors."""

    def __init__(
        self,
        agreement: Agreement,
        write_tensors: Callable[[Path], Pending],
        retention: Retention,
        contents: Sequence[str] = CONTENTS,
    ) -> None:
        """write_tensors(folder): starts writing model, optimizer and random state into a checkpoint folder. contents:
        the parts that the manifest names."""
        self._contents = contents
        self._agreement, self._write_tensors, self._retention = agreement, write_tensors, retention
        self._saving: _Saving | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint-checksums")

    def start(self, final: Path, trainer_state: dict, controller_state: Callable[[], dict]) -> None:
        """Begin a checkpoint; one that is still being written is finished first.

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
        try:
            self._saving = _Saving(staged, final, self._write_tensors(staged))
        except Exception:
            self._give_up(staged)
            raise

    def poll(self) -> None:
        """Now and then: carries on what is ready, waits for nothing. Raises JobError on all ranks where a write
        failed since the last call."""
        saving = self._saving
        if saving is None:
            return
        if saving.sealing is None:
            if saving.pending.is_done():
                self._seal()
        elif all(self._agreement.gather(saving.sealing.done())):
            self._publish()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is in its place. Raises JobError on all ranks."""
        if self._saving is not None and self._saving.sealing is None:
            self._seal()
        if self._saving is not None:
            self._publish()

    def _seal(self) -> None:
        """All tensors are written: each rank flushes and sums up its share of the files."""
        saving = self._saving
        try:
            saving.pending.finish()
            names = self._agreement.leader(f"listing {saving.staged}", file_names, saving.staged)
        except Exception:
            self._give_up(saving.staged)
            raise
        share = names[self._agreement.rank :: self._agreement.size]
        saving.sealing = self._thread.submit(seal, saving.staged, share)

    def _publish(self) -> None:
        saving = self._saving
        try:
            parts = self._agreement.all(f"reading {saving.staged} again", saving.sealing.result)
            files = {name: record for part in parts for name, record in part.items()}
            self._agreement.leader(f"publishing {saving.final}", self._put_in_place, files)
        except Exception:
            self._give_up(saving.staged)
            raise
        self._saving = None

    def _put_in_place(self, files: dict[str, FileRecord]) -> None:
        saving = self._saving
        write_manifest(saving.staged, self._contents, files)
        publish(saving.staged, saving.final)
        retire(saving.final, self._retention.keep_last, self._retention.keep_every)

    def _give_up(self, staged: Path) -> None:
        """Nothing partial stays behind. Where it cannot be deleted, because another process still writes into it, the
        next start does that: what failed is the error to be told."""
        self._saving = None
        if self._agreement.rank == 0:
            with suppress(OSError):
                discard(staged)
