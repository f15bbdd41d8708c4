"""The starts of a server over several nodes, agreed by files between the supervisors of its nodes.

The leader's supervisor alone decides. It orders each start under a new name; a follower's
supervisor ends the process of an older order, starts one for the new order, and reports how it
ended. So all processes of a server start and end together, at whatever moment a supervisor looks,
and an order or a report of an earlier start counts for nothing.
"""

import logging
import secrets
from pathlib import Path

from megatron_dapo.common.files import write_whole

log = logging.getLogger(__name__)

_MAX_BYTES = 2**16
_ORDER = "order"
NO_PROCESS = ""
"""The order to run none: the server was stopped, or is given up."""


class StartOrders:
    """The orders for a server's followers, as its leader's supervisor gives them. Without followers
    there are none."""

    def __init__(self, folder: Path, num_followers: int) -> None:
        """Forget the order of an earlier supervisor. folder: see `RunFolder.server_starts`."""
        self.num_followers = num_followers
        self._folder = folder
        self._order: str | None = None
        self._file = _OwnFile(folder / _ORDER)
        if num_followers:
            (folder / _ORDER).unlink(missing_ok=True)

    def start(self) -> None:
        """Order a new start, instead of the last one."""
        self._give(secrets.token_hex(8))

    def stop(self) -> None:
        """Order the end of all followers."""
        self._give(NO_PROCESS)

    def failure(self) -> str | None:
        """Return how a follower of the last start ended; None while all run."""
        if self._order is not None:
            self._give(self._order)
        for rank in range(1, self.num_followers + 1):
            order, _, words = (_read(_report(self._folder, rank)) or "").partition("\n")
            if words and order == self._order:
                return words
        return None

    def _give(self, order: str) -> None:
        self._order = order
        if self.num_followers:
            self._file.hold(order)


class FollowedOrders:
    """The orders as a follower's supervisor reads and answers them."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._file = _OwnFile(_report(folder, rank))

    def read(self) -> str | None:
        """Return the last order, a start's name or NO_PROCESS; None before the first one."""
        return _read(self._folder / _ORDER)

    def report(self, order: str, end: str) -> None:
        """Say how the process of a start ended; to be called at each look after that."""
        self._file.hold(f"{order}\n{end}")


class _OwnFile:
    """A small file of one writer, who writes it again where that failed, or somebody removed it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: str | None = None
        self._is_failing = False

    def hold(self, text: str) -> None:
        """Have the file hold these words. A failure, as on a full disk, is logged once."""
        try:
            if text != self._held or not self._path.exists():
                write_whole(self._path, text)
            self._held, self._is_failing = text, False
        except OSError as error:
            if not self._is_failing:
                log.warning("%s cannot be written: %s", self._path, error)
            self._is_failing = True


def _report(folder: Path, rank: int) -> Path:
    return folder / f"end-{rank}"


def _read(file: Path) -> str | None:
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be read: %s", file, error)
        return None
