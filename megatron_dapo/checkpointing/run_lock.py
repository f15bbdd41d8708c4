"""One run in a run folder at a time: two would delete each other's half-written checkpoints and mix their metrics."""

import time
from pathlib import Path

from megatron_dapo.config import UserError
from megatron_dapo.config.file_lock import FileLock

# a file server may take this long to find that a node which held the lock is lost (NFS: a lease of 90 s)
PATIENCE_S = 150.0
_POLL_S = 0.5


class RunLock:
    """Held by this process until `release` or its end; see FileLock."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, FileLock(path)

    def acquire(self, patience_s: float = PATIENCE_S) -> None:
        """Waits for a run that is about to end. Raises UserError where it does not, or the folder cannot be written."""
        deadline, told = time.monotonic() + patience_s, False
        while not self._try_acquire():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self._path.parent} is the folder of a run that is going on ({self._lock.holder()}); stop that "
                    f"one, choose another trainer.run_dir, or, where it is lost with its node, remove {self._path}."
                )
            if not told:
                print(f"Waiting for {self._lock.holder()}, which holds {self._path.parent}", flush=True)
                told = True
            time.sleep(_POLL_S)

    def _try_acquire(self) -> bool:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._lock.try_acquire()
        except OSError as error:
            raise UserError(
                f"{self._path.parent} cannot be written ({error.strerror}); choose another trainer.run_dir."
            ) from error

    def release(self) -> None:
        self._lock.release()
