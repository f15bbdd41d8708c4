"""Times the phases of a step and hands its metrics to the sinks of `trainer.logger`, on rank 0."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Group
from megatron_dapo.platform import watchdog
from megatron_dapo.platform.agreement import describe
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.sample_table import sample_table
from megatron_dapo.telemetry.sinks import SINKS, Record, Sink, make_sink
from megatron_dapo.telemetry.timers import PhaseTimers

log = logging.getLogger(__name__)


class Telemetry:
    """Use on rank 0; every other rank takes `NullTelemetry`.

    Order within a step: its phases, `log(step)`; a due `log_validation(step)` comes within the next
    step. `log` takes the phases' seconds since the last record; after the last step
    `log_validation` does.
    """

    def __init__(self, config: Config, run_folder: RunFolder, resumed_after: int | None = None) -> None:
        self._config = config
        self._timers = PhaseTimers()
        self._sinks: dict[str, Sink] = {
            name: make_sink(name, config, run_folder, resumed_after) for name in config.trainer.logger
        }
        self._failing: set[str] = set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside as `time/NAME` of the next `log` or `log_validation`."""
        with watchdog.phase(name), self._timers.phase(name):
            yield

    def seconds(self, name: str) -> float:
        """Return the seconds of a phase since the last record."""
        return self._timers.seconds(name)

    def step_seconds(self) -> float:
        """Return the seconds since the first phase after the last record began."""
        return self._timers.step_seconds()

    def log(self, step: int, metrics: dict[str, float], groups: Sequence[Group] | None = None) -> None:
        """Report one rollout step.

        Args:
            metrics: flat, see docs/metrics.md; a name may be missing, a value may be NaN.
            groups: the step's groups; some loggers show a few.
        """
        samples = sample_table(self._config, step, groups)
        self._write(Record(step, {**metrics, **self._timers.take()}, is_validation=False, samples=samples))

    def log_validation(self, step: int, metrics: dict[str, float], in_step: bool = False) -> None:
        """Report a held-out evaluation with the weights after `step` rollout steps (0: before the
        first).

        Args:
            in_step: whether a step is under way; its record then gets the phases' seconds.
        """
        seconds = {} if in_step else self._timers.take()
        self._write(Record(step, {**metrics, **seconds}, is_validation=True))

    def close(self) -> None:
        for name, sink in self._sinks.items():
            self._try(name, sink.close, "at the end")

    def _write(self, record: Record) -> None:
        for name, sink in self._sinks.items():
            self._try(name, partial(sink.write, record), f"at step {record.step}")

    def _try(self, name: str, work: Callable[[], None], when: str) -> None:
        """Do the work, but end no run for a metric: a failure, as on a full disk or of the user's own
        class, is reported once until writing works again."""
        try:
            work()
        except Exception as error:
            if name in SINKS and not isinstance(error, OSError):
                raise
            if name not in self._failing:
                log.warning("metrics for %s cannot be written %s (%s); training goes on", name, when, describe(error))
            self._failing.add(name)
        else:
            self._failing.discard(name)


class NullTelemetry:
    """The telemetry of the other ranks: passes phases to the watchdog, and records nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return watchdog.phase(name)

    def seconds(self, name: str) -> float:
        return 0.0

    def step_seconds(self) -> float:
        return 0.0

    def log(self, step: int, metrics: dict[str, float], groups: Sequence[Group] | None = None) -> None:
        pass

    def log_validation(self, step: int, metrics: dict[str, float], in_step: bool = False) -> None:
        pass

    def close(self) -> None:
        pass
