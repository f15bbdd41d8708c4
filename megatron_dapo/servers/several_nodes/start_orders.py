"""The starts of a server over several nodes, agreed by files between the supervisors of its nodes.

The leader's supervisor alone decides. It orders each start under a new name; a follower's
supervisor ends the process of an older order, starts one for the new order, and reports how it
ended. So all processes of a server start and end together, at whatever moment a supervisor looks,
and an order or a report of an earlier start counts for nothing.
"""

import logging
import secrets
from pathlib import Path

from megatron_dapo.common.files import remove_folder, write_whole

log = logging.getLogger(__name__)

_MAX_BYTES = 2**16
_ORDER = "order"
NO_PROCESS = ""
"""The order to run none: the server was stopped, or is given up."""


class StartOrders:
    """The orders for a server's followers, as its leader's supervisor gives them. Without followers
    there are none."""

    def __init__(self, folder: Path, num_followers: int) -> None:
        """Forget what an earlier supervisor left. folder: see `RunFolder.server_starts`."""
        self.num_followers = num_followers
        self._folder = folder
        self._order: str | None = None
        self._is_written = True
        if num_followers:
            remove_folder(folder)

    def start(self) -> None:
        """Order a new start, instead of the last one."""
        self._give(secrets.token_hex(8))

    def stop(self) -> None:
        """Order the end of all followers."""
        self._give(NO_PROCESS)

    def failure(self) -> str | None:
        """Return how a follower of the last start ended; None while all run."""
        self._write()
        for rank in range(1, self.num_followers + 1):
            order, _, words = (_read(_report(self._folder, rank)) or "").partition("\n")
            if words and order == self._order:
                return words
        return None

    def _give(self, order: str) -> None:
        self._order, self._is_written = order, False
        self._write()

    def _write(self) -> None:
        if not self._is_written and self.num_followers:
            self._is_written = _written(self._folder / _ORDER, self._order or NO_PROCESS)


class FollowedOrders:
    """The orders as a follower's supervisor reads and answers them."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank

    def read(self) -> str | None:
        """Return the last order, a start's name or NO_PROCESS; None before the first one."""
        return _read(self._folder / _ORDER)

    def report(self, order: str, end: str) -> bool:
        """Say how the process of a start ended; return whether that could be written."""
        return _written(_report(self._folder, self._rank), f"{order}\n{end}")


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


def _written(file: Path, text: str) -> bool:
    """Write a file of these words; return False if that fails, as on a full disk."""
    try:
        write_whole(file, text)
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error)
        return False
    return True
