"""One run in a run folder at a time: two would delete each other's half-written checkpoints and mix their metrics."""

import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

from megatron_dapo.config import UserError

# a file server may take this long to find that a node which held the lock is lost (NFS: a lease of 90 s)
PATIENCE_S = 150.0
_POLL_S = 0.5


class RunLock:
    """Held by this process until `release` or its end, however it ends. Its children, which may live longer, do not
    hold it. Where the storage knows no locks nothing is held."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def acquire(self, patience_s: float = PATIENCE_S) -> None:
        """Waits for a run that is about to end. Raises UserError where it does not, or the folder cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{self._path.parent} cannot be written ({error.strerror}); choose another trainer.run_dir."
            ) from error
        deadline, told = time.monotonic() + patience_s, False
        while not self._is_mine():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self._path.parent} is the folder of a run that is going on ({self._holder()}); stop that one, "
                    f"choose another trainer.run_dir, or, where it is lost with its node, remove {self._path}."
                )
            if not told:
                print(f"Waiting for {self._holder()}, which holds {self._path.parent}", flush=True)
                told = True
            time.sleep(_POLL_S)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        self._file.flush()

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_mine(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # no locks here
            return True
        return True

    def _holder(self) -> str:
        self._file.seek(0)
        return self._file.read().strip() or "another process"
