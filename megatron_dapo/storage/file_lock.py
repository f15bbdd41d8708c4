"""A lock in the form of a file, for processes on several nodes that share storage."""

import fcntl
import os
import re
from pathlib import Path
from typing import TextIO


class FileLock:
    """Held by this process until `release` or its end, however it ends. Its children, which may live longer, do not
    hold it. Where the storage knows no locks nothing is held."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def try_acquire(self) -> bool:
        """Whether this process holds it now. Raises OSError where the file cannot be made."""
        while True:
            self._file = self._file or self.path.open("a+", encoding="utf-8")
            is_mine = self._is_mine()
            if self._is_there():
                break
            self.release()  # who held it has removed it: a lock on it would keep nobody out
        if is_mine:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            self._file.flush()
        return is_mine

    def holder(self) -> str:
        """Who holds it, in words, after try_acquire."""
        self._file.seek(0)
        return self._file.read().strip() or "another process"

    def holder_here(self) -> int | None:
        """Pid of its holder, after try_acquire, where that is a process of this machine that runs."""
        found = re.fullmatch(r"process (\d+) on (.*)", self.holder())
        if found is None or found[2] != os.uname().nodename:
            return None
        try:
            os.kill(int(found[1]), 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # another user's
            pass
        return int(found[1])

    def release(self, remove: bool = False) -> None:
        """remove: the file goes too; only for the holder."""
        if remove:
            self.path.unlink(missing_ok=True)
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

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False
