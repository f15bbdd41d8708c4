"""The process of a server on a node that does not lead it: obeys the leader's supervisor."""

import logging
from pathlib import Path

from megatron_dapo.common.exit_codes import exit_phrase
from megatron_dapo.common.log_lines import last_error
from megatron_dapo.servers.child_process import TAIL_PREFIX
from megatron_dapo.servers.server_command import ServerCommand
from megatron_dapo.servers.several_nodes.start_orders import NO_PROCESS, FollowedOrders
from megatron_dapo.servers.supervisor import ServerStart

log = logging.getLogger(__name__)


class Follower:
    """One follower over all its starts. It is not judged here: its server is, by its leader."""

    def __init__(self, name: str, command: ServerCommand, log_file: Path, orders: FollowedOrders) -> None:
        self.name = name
        self._command = command
        self._log_file = log_file
        self._orders = orders
        self._obeyed: str | None = None
        self._current: ServerStart | None = None  # the last start
        self._end: str | None = None  # of the last start, in words
        self._was_started = False

    @property
    def is_over(self) -> bool:
        """Return whether its server was started and then stopped for good."""
        return self._was_started and self._obeyed == NO_PROCESS

    def look(self) -> bool:
        """Obey the last order, and report the end of its process. Return whether that runs."""
        order = self._orders.read()
        if order is not None and order != self._obeyed:
            self._obey(order)
        if self._current is not None and self._end is None:
            if (code := self._current.process.poll()) is None:
                self._current.files.note(self._current.process.pids())
                return True
            self._note_end(exit_phrase(code), self._current.process.log_tail())
        if self._end is not None:
            self._orders.report(str(self._obeyed), self._end)
        return False

    def pids(self) -> list[int]:
        """Return the process of the last start."""
        return [self._current.process.pid] if self._current else []

    def ask_to_end(self) -> None:
        """Send SIGTERM; a follower at work waits for its leader's word, too."""
        if self._current is not None:
            self._current.process.terminate()

    def stop(self, grace_s: float) -> None:
        """End the process and all its children."""
        if self._current is not None:
            self._current.stop_process(grace_s)
            self._current.files.remove()
            self._current = None

    def _obey(self, order: str) -> None:
        self.stop(0.0)
        self._obeyed, self._end = order, None
        if order == NO_PROCESS:
            return
        self._was_started = True
        try:
            self._current = ServerStart(self.name, self._command, self._log_file)
            log.info("%s starts (pid %d, log %s)", self.name, self._current.process.pid, self._log_file)
        except OSError as error:  # the node's disk is full, or it has no process left
            self._note_end(f"could not be started ({error})")

    def _note_end(self, end: str, log_tail: str = "") -> None:
        error = last_error([line.removeprefix(TAIL_PREFIX) for line in log_tail.splitlines()])
        self._end = f"{self.name} {end}{f' ({error})' if error else ''}; its log is {self._log_file}"
        log.error("%s", self._end)
