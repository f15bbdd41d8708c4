"""One run in a run folder at a time: two would delete each other's half-written checkpoints and mix
their metrics."""

import time
from pathlib import Path

from megatron_dapo.common.errors import UserError
from megatron_dapo.storage.file_lock import FileLock

# a file server's time to notice the loss of the node that held the lock (NFS: a lease of 90 s)
PATIENCE_S = 150.0
# a process of this machine that was just killed may take this long to give its memory back
PATIENCE_HERE_S = 15.0
_POLL_S = 0.5


class RunLock:
    """The lock of a run folder, held by this process until `release` or its end; see FileLock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(path)

    def acquire(self, patience_s: float = PATIENCE_S) -> None:
        """Take the lock, after waiting for a run near its end.

        The wait is shorter if the holder is a running process of this machine. Raises UserError if
        the holder does not end, or the folder is not writable.
        """
        start = time.monotonic()
        has_said = False
        while not self._try_acquire():
            pid = self._lock.holder_here()
            limit_s = patience_s if pid is None else min(patience_s, PATIENCE_HERE_S)
            cure = f"remove {self._path} if it is lost with its node" if pid is None else _ended_by(pid)
            if time.monotonic() - start >= limit_s:
                raise UserError(
                    f"{self._path.parent} is the folder of an active run ({self._lock.holder()}): {cure}, or "
                    "choose another trainer.run_dir."
                )
            if not has_said:
                holder = f"{self._lock.holder()}, which holds {self._path.parent}"
                print(f"Waiting {limit_s:g} s at most for {holder}: {cure}", flush=True)
                has_said = True
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


def _ended_by(pid: int) -> str:
    """Return the way to end a trainer's rank, as part of a sentence."""
    return f"`kill {pid}` has it save and stop, at the latest when its step ends, `kill -9 {pid}` ends it at once"
