"""A lock in the form of a file, for processes on several nodes that share storage."""

import fcntl
import os
import re
from pathlib import Path
from typing import TextIO


class FileLock:
    """Lock of this process, held until `release` or the end of the process; children do not inherit
    it. On storage without locks, every attempt succeeds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def try_acquire(self) -> bool:
        """Return whether this process holds the lock now. Raises OSError if the file cannot be
        made."""
        while True:
            file = self._open()
            is_held = _try_lock(file)
            if self._is_there(file):
                break
            self.release()  # its holder has removed it: a lock on it would be useless
        if is_held:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
        return is_held

    def holder(self) -> str:
        """Return in words who holds the lock, after try_acquire."""
        file = self._open()
        file.seek(0)
        return file.read().strip() or "another process"

    def holder_here(self) -> int | None:
        """Return the holder's pid after try_acquire, if it is a running process of this machine."""
        match = re.fullmatch(r"process (\d+) on (.*)", self.holder())
        if match is None or match[2] != os.uname().nodename:
            return None
        pid = int(match[1])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # another user's
            pass
        return pid

    def release(self, remove: bool = False) -> None:
        """Give the lock back. remove: the file goes too; only for the holder."""
        if remove:
            self.path.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> TextIO:
        if self._file is None:
            self._file = self.path.open("a+", encoding="utf-8")
        return self._file

    def _is_there(self, file: TextIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False


def _try_lock(file: TextIO) -> bool:
    """Lock a file and return whether that worked; true on storage without locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # no locks here
        return True
    return True
