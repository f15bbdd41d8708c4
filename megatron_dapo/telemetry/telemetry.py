"""Rank 0's ear and mouth: times phases, hands each step's metrics to the sinks of `trainer.logger`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from megatron_dapo.config import Config, RunFolder
from megatron_dapo.platform import watchdog
from megatron_dapo.telemetry.sinks import SINKS, Record, Sink
from megatron_dapo.telemetry.timers import PhaseTimers


class Telemetry:
    """Use on rank 0; every other rank takes `NullTelemetry`.

    Order within a step: its phases, `log(step)`, then (where it is due) the validation's phase and
    `log_validation(step)`. Each of the two takes the seconds of the phases since the last one.
    """

    def __init__(self, config: Config, run_folder: RunFolder, resumed_after: int | None = None) -> None:
        self._timers = PhaseTimers()
        self._sinks: list[Sink] = [SINKS[name](config, run_folder, resumed_after) for name in config.trainer.logger]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside as `time/NAME` of the next `log` or `log_validation`."""
        with watchdog.phase(name), self._timers.phase(name):
            yield

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Report one rollout step. metrics: flat, see docs/metrics.md; a name may be missing, a value may be NaN."""
        self._write(Record(step, {**metrics, **self._timers.take()}, is_validation=False))

    def log_validation(self, step: int, metrics: dict[str, float]) -> None:
        """Report a held-out evaluation with the weights after `step` rollout steps (0 = before the first)."""
        self._write(Record(step, {**metrics, **self._timers.take()}, is_validation=True))

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)


class NullTelemetry:
    """The same calls, of which nobody hears but the watchdog."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return watchdog.phase(name)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def log_validation(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        pass
