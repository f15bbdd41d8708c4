"""Removes the files of an SGLang server outside the run folder: the server leaves them.

Its sockets (`tmp01234567` in TMPDIR) get a folder of their own. Its shared memory
(/dev/shm/sglang_loads_*) has a random name known only to its processes. It is looked up among their
open files and noted in that folder, for the successor of a killed supervisor.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from megatron_dapo.common.child_environment import cache_folder, has_room_for_sockets

_PREFIX = "dapo-server-"
_SHARED_MEMORY = ".shared_memory"  # in the folder: paths, one per line
_SHARED_MEMORY_PATHS = "/dev/shm/sglang_loads_"


class ServerFiles:
    """The private folder of one start of a server.

    Its maker holds its lock. Once that process is gone, the next one may remove it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Make the folder in the place of the server's temporary files."""
        parent = Path(environment.get("TMPDIR") or tempfile.gettempdir())
        if not has_room_for_sockets(parent / f"{_PREFIX}01234567"):
            parent = Path("/tmp")
        _remove_abandoned(parent)
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock: int | None = _locked(self._folder)
        self._noted: set[str] = set()
        self._list = self._folder / _SHARED_MEMORY
        self._list.touch()
        self.variables = {"TMPDIR": str(self._folder)}
        # by default it is in TMPDIR, and would be built at each start
        if "TORCHINDUCTOR_CACHE_DIR" not in environment:
            self.variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder({"TMPDIR": str(parent)}) / "torchinductor")

    def note(self, pids: Iterable[int]) -> None:
        """Look for the shared memory of the server's processes. To be called while they live."""
        paths = {path for pid in pids for path in _open_files(pid) if path.startswith(_SHARED_MEMORY_PATHS)}
        new = paths - self._noted
        if new:
            self._noted |= new
            with self._list.open("a", encoding="utf-8") as file:
                file.writelines(f"{path}\n" for path in sorted(new))

    def remove(self) -> None:
        """Remove the folder and the shared memory, after the server's end. Can be called twice."""
        if self._lock is not None:
            _remove(self._folder)
            os.close(self._lock)
            self._lock = None


def _remove_abandoned(parent: Path) -> None:
    """Remove the files left by this user's killed supervisors."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid() or not (folder / _SHARED_MEMORY).exists():
                continue
            lock = _locked(folder)
        except OSError:  # it goes right now, or its supervisor lives
            continue
        _remove(folder)
        os.close(lock)


def _locked(folder: Path) -> int:
    """Return an open file with the lock on a folder. Raises OSError if another process has it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove(folder: Path) -> None:
    with suppress(OSError):
        for path in (folder / _SHARED_MEMORY).read_text(encoding="utf-8").splitlines():
            if path.startswith(_SHARED_MEMORY_PATHS):
                Path(path).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _open_files(pid: int) -> list[str]:
    paths = []
    with suppress(OSError):  # the process is gone
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                paths.append(os.readlink(entry.path))
    return paths
