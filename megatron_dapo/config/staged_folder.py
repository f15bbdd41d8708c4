"""A folder that appears whole, by rename, or not at all."""

import os
import shutil
from pathlib import Path

from megatron_dapo.errors import UserError


class StagedFolder:
    """Fill `staging`, a hidden folder beside `path`; then `publish` gives it its name, or `discard` removes it.

    What a killed process left in the staging folder is removed by the next one. replace: a folder that is there
    already gives way at the moment of publishing; otherwise it is an error from the start.
    """

    def __init__(self, path: str | Path, *, replace: bool = False) -> None:
        self.path = Path(os.path.abspath(path))
        self.staging = self.path.with_name(f".{self.path.name}.staging")
        self._replace = replace

    def open(self) -> None:
        """Make the staging folder, empty. Raises UserError where it cannot be made or the target is there."""
        if self.path.exists() and not self._replace:
            raise UserError(f"`{self.path}` exists already; remove it, or give another folder.")
        try:
            if self.staging.exists():
                shutil.rmtree(self.staging)
            self.staging.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"`{self.path}` cannot be written ({error.strerror}); give a folder on a disk that can be written."
            ) from error

    def publish(self) -> None:
        """The folder has its name, and that is on the disk. Raises OSError."""
        old = self.path.with_name(f".{self.path.name}.old")
        if self.path.exists():
            if old.exists():
                shutil.rmtree(old)
            self.path.rename(old)
        self.staging.rename(self.path)
        descriptor = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if old.exists():
            shutil.rmtree(old)

    def discard(self) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)
