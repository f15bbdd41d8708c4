"""A folder that appears whole, by rename, or not at all."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import flush_to_disk, publish_folder, remove_folder
from megatron_dapo.storage.file_lock import FileLock


class StagedFolder:
    """Fill `staging`, a hidden folder beside `path`; then `publish` gives it its name; `discard` in
    any case.

    One process at a time makes a folder; it removes the staging folder of a killed predecessor.

    Args:
        replace: whether publishing replaces an existing folder; otherwise that is an error.
    """

    def __init__(self, path: str | Path, *, replace: bool = False) -> None:
        self.path = Path(os.path.abspath(path))
        self.staging = self.path.with_name(f".{self.path.name}.staging")
        self._replace = replace
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        self._is_mine = False
        self._made: list[Path] = []  # the folders above it that were not there, the innermost first

    def open(self) -> None:
        """Make the staging folder, empty. Raises UserError if that fails, the target exists, or
        another process is writing it."""
        self._check_target()
        try:
            self._made = [folder for folder in self.path.parents if not folder.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._is_mine = self._lock.try_acquire()
            if self._is_mine:
                self._check_target()  # the one who wrote it may just have ended
                if self.staging.exists():
                    shutil.rmtree(self.staging)
                self.staging.mkdir()
        except OSError as error:
            raise UserError(
                f"`{self.path}` cannot be written ({error.strerror}); give a folder on a disk that can be written."
            ) from error
        if not self._is_mine:
            raise UserError(
                f"`{self.path}` is being written by {self._lock.holder()}; wait for its end, give another folder, or, "
                f"if its node is lost, remove {self._lock.path}."
            )

    def publish(self) -> None:
        """Flush all files to the disk, and give the folder its name. Raises OSError, or UserError
        if that name was taken meanwhile."""
        for path in (*self.staging.rglob("*"), self.staging):
            flush_to_disk(path)
        self._check_target()
        old = self.path.with_name(f".{self.path.name}.old")
        publish_folder(self.staging, self.path, old)
        remove_folder(old)

    def discard(self) -> None:
        """Remove an unpublished folder; leave alone the folder of another process."""
        if self._is_mine:
            shutil.rmtree(self.staging, ignore_errors=True)
        with suppress(OSError):  # files that could not be made cannot be removed either
            self._lock.release(remove=self._is_mine)
        self._is_mine = False
        for folder in self._made:
            with suppress(OSError):  # not empty: the folder is there
                folder.rmdir()

    def _check_target(self) -> None:
        if self.path.exists() and not self._replace:
            raise UserError(f"`{self.path}` exists already; remove it, or give another folder.")
