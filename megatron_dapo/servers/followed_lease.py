"""The lease of shared GPUs, as supervisors and watches over servers follow it; see
`storage.lease`."""

import logging
import sys
from collections.abc import Collection

from megatron_dapo.config.derived import shares_gpus
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.lease import Holder, Lease, LeaseFolder
from megatron_dapo.storage.run_folder import RunFolder

log = logging.getLogger(__name__)


def lease_of(config: Config) -> LeaseFolder | None:
    """Return the lease of a run's GPUs; None for servers with GPUs of their own."""
    return LeaseFolder(RunFolder.of(config.trainer).lease) if shares_gpus(config) else None


def _read(lease: LeaseFolder) -> Lease | None:
    try:
        return lease.read()
    except (OSError, ValueError) as error:
        log.warning("the lease of the GPUs cannot be read: %s", error)
        return None


def turn_awake(lease: LeaseFolder | None) -> int | None:
    """Return the turn of the lease while servers are awake; 0 without a lease.

    None while nothing may reach them, and while the lease cannot be read.
    """
    now = Lease() if lease is None else _read(lease)
    return now.turn if now is not None and now.holder is Holder.SERVERS else None


class FollowedLease:
    """The lease as a supervisor obeys it. Without one its servers are always awake."""

    def __init__(self, folder: LeaseFolder | None, supervisor: str) -> None:
        """Begin with the servers. supervisor: its name among all of the run."""
        self._folder = folder
        self._supervisor = supervisor
        self._lease = Lease()
        self._answered: tuple[int, set[str]] | None = None

    @property
    def is_with_servers(self) -> bool:
        """Return whether servers were awake at the last look."""
        return self._lease.holder is Holder.SERVERS

    @property
    def is_with_trainer(self) -> bool:
        """Return whether no server could hold memory at the last look."""
        return self._lease.holder is Holder.TRAINER

    def look(self) -> set[str]:
        """Read the lease, and return the servers condemned since the last look."""
        before = self._lease
        self._lease = (_read(self._folder) if self._folder else None) or before
        return set(self._lease.condemned) if self._lease.turn != before.turn else set()

    def answer(self, gone: Collection[str], *, for_good: bool = False) -> None:
        """Answer the turn of the last look, if there is news.

        Args:
            gone: URLs of the servers without a process.
            for_good: nothing is started any more, so that this answers all later turns too.
        """
        answer = (sys.maxsize if for_good else self._lease.turn, set(gone))
        if self._folder is None or answer == self._answered:
            return
        try:
            self._folder.answer(self._supervisor, answer[0], sorted(answer[1]))
        except OSError as error:  # a full disk: at the next look again
            log.warning("the lease of the GPUs cannot be answered: %s", error)
            return
        self._answered = answer
