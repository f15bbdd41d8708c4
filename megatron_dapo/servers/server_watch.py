"""Watches whether a server still works.

Its processes may live and HTTP may answer without any generation. The trainer and the controller
meet silent servers, but only a supervisor can start them again. They leave a note in the run
folder, and the supervisor's watch looks into it.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from megatron_dapo.common.files import write_whole
from megatron_dapo.servers.followed_lease import turn_awake
from megatron_dapo.servers.server_health import UNAVAILABLE, HealthCheck
from megatron_dapo.storage.lease import LeaseFolder
from megatron_dapo.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
ASK_INTERVAL_S = 10.0

ANSWER_S = 10.0
HEALTH_ANSWER_S = 30.0  # SGLang gives its own processes 20
"""How long a route may take."""

MIN_MISSES = 2
SUSPECT_LIMIT_S = 15.0
GENERATE_LIMIT_S = 120.0
PUSH_MARGIN_S = 60.0
"""On top of `weight_sync.timeout_s`: during a push a server's scheduler may not answer."""


def report_unresponsive(run: RunFolder, why: Mapping[str, str]) -> None:
    """Leave a note about these servers (URL -> observation) for their supervisors. Never raises."""
    for url, text in why.items():
        note = run.unresponsive(url)
        try:
            note.parent.mkdir(exist_ok=True)
            write_whole(note, f"{text}\n")
        except OSError as error:
            log.warning("%s does not answer, and its supervisor cannot be told: %s", url, error)


class _FellAsleep(Exception):
    """The lease of shared GPUs changed during a question: its answer means nothing."""


class ServerWatch:
    """A thread that asks one server for its health every few seconds, until `stop`.

    The scheduler answers `/server_info`. The work of scheduler and detokenizer answers
    `/health_generate`, never asked of a paused server: it generates nothing. Neither disturbs a
    server at work.

    A note of `report_unresponsive` makes the server suspect: its limit is SUSPECT_LIMIT_S until it
    is seen to work. A paused server stays suspect: it may answer while its GPUs wait for a dead
    one.

    With shared GPUs a server is asked nothing while it sleeps, and with each change of the lease
    all begins anew. Pushes come while servers sleep: an awake one that stays paused does not work.
    """

    def __init__(
        self,
        status_of: Callable[[HealthCheck, float], int | None],
        silent_limit_s: float,
        note: Path,
        lease: LeaseFolder | None = None,
    ) -> None:
        """Begin to watch.

        Args:
            status_of: (check, seconds) -> status of the answer; None without one.
            silent_limit_s: longest silence of an unsuspected server's scheduler, in seconds.
            note: file of `report_unresponsive` about this server.
            lease: of shared GPUs.
        """
        self._status_of = status_of
        self._note = note
        self._limits = {
            HealthCheck.SCHEDULER_ANSWERS: silent_limit_s,
            HealthCheck.GENERATED_LATELY: GENERATE_LIMIT_S,
            HealthCheck.TAKES_REQUESTS: GENERATE_LIMIT_S,
        }
        self._lease = lease
        self._turn = turn_awake(lease)  # of the lease, to which the misses belong
        self._is_ill = False
        self._is_suspect = False
        self._num_misses = 0
        self._answered_at = time.monotonic()
        self._unanswered = HealthCheck.SCHEDULER_ANSWERS
        self._ended = threading.Event()
        self._remove_note()  # it became healthy after it was written
        threading.Thread(target=self._run, name="server-watch", daemon=True).start()

    def failure(self) -> str | None:
        """Return its failure to answer in words; None while it works."""
        if self._num_misses < MIN_MISSES or turn_awake(self._lease) != self._turn:
            return None
        silence_s = time.monotonic() - self._answered_at
        limit_s = self._limits[self._unanswered]
        if self._is_suspect:
            limit_s = min(limit_s, SUSPECT_LIMIT_S)
        return f"has not answered {self._unanswered} for {silence_s:.0f} s" if silence_s > limit_s else None

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()

    def _run(self) -> None:
        due = time.monotonic() + ASK_INTERVAL_S
        while not self._ended.wait(POLL_INTERVAL_S):
            turn = turn_awake(self._lease)
            if turn != self._turn:
                self._begin_anew()
                self._turn = turn  # the last: `failure` compares it
                due = time.monotonic() + ASK_INTERVAL_S
            if turn is None:
                continue
            if not self._is_suspect and self._note.exists():
                self._is_suspect = True
                self._begin_anew()
            if self._is_suspect or time.monotonic() >= due:
                with suppress(_FellAsleep):
                    self._look()
                due = time.monotonic() + ASK_INTERVAL_S

    def _begin_anew(self) -> None:
        self._num_misses = 0
        self._answered_at = time.monotonic()

    def _look(self) -> None:
        asked_at = time.monotonic()
        if self._ask(HealthCheck.SCHEDULER_ANSWERS, ANSWER_S) is None:
            self._miss(HealthCheck.SCHEDULER_ANSWERS)
            return
        is_paused = not self._is_ill and self._ask(HealthCheck.TAKES_REQUESTS, ANSWER_S) == UNAVAILABLE
        if is_paused and self._lease is not None:
            self._miss(HealthCheck.TAKES_REQUESTS)
            return
        self._is_ill = not is_paused and not self._generates()
        if self._is_ill:
            self._miss(HealthCheck.GENERATED_LATELY)
            return
        self._num_misses = 0
        self._answered_at = asked_at
        if self._is_suspect and not is_paused:
            self._is_suspect = False
            self._remove_note()

    def _ask(self, check: HealthCheck, timeout_s: float) -> int | None:
        """Return the status of the answer, None without one. Raises _FellAsleep."""
        status = self._status_of(check, timeout_s)
        if turn_awake(self._lease) != self._turn:
            raise _FellAsleep
        return status

    def _generates(self) -> bool:
        status = self._ask(HealthCheck.GENERATED_LATELY, HEALTH_ANSWER_S)
        return status is not None and status != UNAVAILABLE

    def _miss(self, check: HealthCheck) -> None:
        self._unanswered = check
        self._num_misses += 1

    def _remove_note(self) -> None:
        try:
            self._note.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", self._note, error)
