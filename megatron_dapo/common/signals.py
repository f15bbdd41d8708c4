"""The one receiver of signals: handlers are installed and put back here and nowhere else."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron_dapo.common.exit_codes import signal_exit_code


def is_ignored(number: signal.Signals) -> bool:
    """Return whether this process ignores a signal, as a child of `nohup` ignores SIGHUP."""
    return signal.getsignal(number) == signal.SIG_IGN


def ignore_signals(numbers: Iterable[signal.Signals]) -> None:
    """Ignore these signals from now on. Processes that this one starts ignore them too."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def reset_signals(numbers: Iterable[signal.Signals]) -> None:
    """Restore the default action of these signals."""
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)


class SignalReceiver:
    """Remembers received signals in order, and may act on each of them.

    Install it for the rest of the process, or enter it to restore the former handlers at the end.
    Outside the main thread it changes nothing, since signals go to the main thread. Child processes
    keep the default action of a received signal, unlike an ignored one.
    """

    def __init__(
        self,
        numbers: Sequence[signal.Signals],
        on_signal: Callable[[signal.Signals], None] | None = None,
        keep_ignored: Sequence[signal.Signals] = (),
    ) -> None:
        """Take the signals to receive; nothing is installed yet.

        Args:
            numbers: the signals.
            on_signal: called in the main thread for each signal, after it was remembered; it may
                raise.
            keep_ignored: signals to leave as they are if they are ignored already.
        """
        self.received: list[signal.Signals] = []
        self._numbers = numbers
        self._on_signal = on_signal
        self._keep_ignored = keep_ignored
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> "SignalReceiver":
        """Receive the signals from now on."""
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in self._numbers:
            if number in self._keep_ignored and is_ignored(number):
                continue
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def restore(self) -> None:
        """Put the handlers back that were there before `install`."""
        for number, handler in self._previous.items():
            # None: a handler that Python did not install
            signal.signal(number, handler or signal.SIG_DFL)
        self._previous = {}

    def __enter__(self) -> "SignalReceiver":
        return self.install()

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _receive(self, number: int, _: object) -> None:
        received = signal.Signals(number)
        self.received.append(received)
        if self._on_signal is not None:
            self._on_signal(received)


class StopSignals:
    """While entered, remembers the first signal that asks to stop, and counts the requests.
    Interrupts nothing.

    Under `nohup`, SIGHUP is no such signal.
    """

    def __init__(
        self,
        numbers: Sequence[signal.Signals],
        ends_at_once: signal.Signals | None = None,
        one_request_s: float = 0.5,
    ) -> None:
        """Take the signals that ask to stop.

        Args:
            numbers: the signals.
            ends_at_once: this signal keeps its default action after the first request.
            one_request_s: signals within this time of the first belong to the same request. Service
                managers send SIGHUP right after SIGTERM, each to the launcher and to the ranks, and
                the launcher passes it on to the ranks.
        """
        self.received: signal.Signals | None = None
        self.num_received = 0
        self._receiver = SignalReceiver(numbers, self._count, keep_ignored=(signal.SIGHUP,))
        self._ends_at_once = ends_at_once
        self._one_request_s = one_request_s
        self._first_at = 0.0

    def __enter__(self) -> "StopSignals":
        self._receiver.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._receiver.restore()

    @property
    def exit_code(self) -> int:
        """Return the exit code of a process that the first of the signals ended."""
        assert self.received is not None
        return signal_exit_code(self.received)

    def _count(self, number: signal.Signals) -> None:
        if self.received is None:
            self.received = number
            self.num_received = 1
            self._first_at = time.monotonic()
            return
        if time.monotonic() - self._first_at < self._one_request_s:
            return
        if number == self._ends_at_once:
            reset_signals([number])
            signal.raise_signal(number)
        self.num_received += 1
