"""A request to stop: SIGTERM or SIGUSR1 to a rank, or a file in the run folder. All ranks stop
together."""

import signal
from pathlib import Path

from megatron_dapo.common.ends import own_folder
from megatron_dapo.common.signals import StopSignals
from megatron_dapo.platform.agreement import Agreement

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ONE_REQUEST_S = 5.0
"""Between the scheduler's own signal to a rank and the copy from a busy launcher."""


class StopRequest:
    """While entered, signals are remembered and do not end the process. A SIGTERM later than
    ONE_REQUEST_S after the first signal ends it at once.

    file: checked by rank 0 only. Outside the main thread signals keep their handlers.
    """

    def __init__(self, file: Path, agreement: Agreement) -> None:
        self._file = file
        self._agreement = agreement
        self._signals = StopSignals(STOP_SIGNALS, ends_at_once=signal.SIGTERM, one_request_s=ONE_REQUEST_S)

    def __enter__(self) -> "StopRequest":
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.__exit__()

    def received(self) -> str | None:
        """Return the stop request of the first rank that has one, the same on all ranks; None:
        continue.

        Collective.
        """
        return next(filter(None, self._agreement.gather(self.local_request())), None)

    def local_request(self) -> str | None:
        """Return the source of this rank's stop request, or None. Not collective."""
        if received := self._signals.received:
            launcher = own_folder() if received == signal.SIGTERM else None
            return (launcher and launcher.stop_reason()) or received.name
        return f"the file {self._file}" if self._agreement.rank == 0 and self._file.exists() else None

    def accept(self) -> None:
        """Remove the file, so that the run can be started again."""
        if self._agreement.rank == 0:
            self._file.unlink(missing_ok=True)
