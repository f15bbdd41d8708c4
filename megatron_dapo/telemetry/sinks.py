"""The sinks of metrics, by the names of `trainer.logger`."""

import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.common.own_function import OwnFunction, having
from megatron_dapo.common.standard_streams import mute, print_line
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.console import COLUMNS as STEP_COLUMNS
from megatron_dapo.telemetry.console import (
    SFT_COLUMNS,
    Column,
    RunLine,
    StepTable,
    progress,
    validation_line,
    warnings_of,
)
from megatron_dapo.telemetry.metrics_file import MetricsFile
from megatron_dapo.telemetry.sample_table import COLUMNS, SampleTable

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True)
class Record:
    """The report of a step, or of a held-out evaluation after it."""

    step: int
    metrics: dict[str, float]
    is_validation: bool
    samples: SampleTable | None = None
    """Some of the step's responses, or None."""


class Sink(Protocol):
    """A destination of records. Its methods raise OSError if it cannot write now."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Console:
    """One line per step on stdout, one about all of them at the end and, on a terminal, a progress
    bar below them."""

    def __init__(self, total_steps: int, columns: Sequence[Column] = STEP_COLUMNS) -> None:
        self._table = StepTable(total_steps, columns)
        self._run_line = RunLine()
        self._told: set[str] = set()  # metrics with a current warning
        # None: closed by the parent process
        has_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._progress = progress(total_steps, has_left=False) if has_terminal else None

    def write(self, record: Record) -> None:
        if record.is_validation:
            self._print(validation_line(record.step, record.metrics))
            self._warn(record)
            return
        self._print(self._table.line(record.step, record.metrics))
        self._warn(record)
        self._run_line.add(record.metrics)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=record.step)

    def _warn(self, record: Record) -> None:
        """Warn of faulty responses and slow servers: once, until it is cured."""
        for metric, words in warnings_of(record.metrics):
            if words is None:
                self._told.discard(metric)
            elif metric not in self._told:
                self._told.add(metric)
                self._print(f"{'held out' if record.is_validation else f'step {record.step}'}: {words}")

    def close(self) -> None:
        if line := self._run_line.line():
            self._print(line)
        if self._progress is not None:
            try:
                self._progress.stop()
            except OSError:  # the terminal is gone
                mute()

    def _print(self, text: str) -> None:
        if self._progress is None:
            print_line(text)
            return
        try:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
        except OSError:
            mute()


class _JsonLines:
    """metrics.jsonl: per line an object with step, time (seconds since 1970) and the metrics; NaN
    and inf are null."""

    def __init__(self, run_folder: RunFolder, resumed_after: int | None = None) -> None:
        self._file = MetricsFile(run_folder.metrics, resumed_after)

    def write(self, record: Record) -> None:
        finite = {name: float(x) if math.isfinite(x) else None for name, x in record.metrics.items()}
        line = {"step": record.step, "time": round(time.time(), 3), **finite}
        self._file.append(json.dumps(line, allow_nan=False))

    def close(self) -> None:
        """Do nothing: every record is written already."""


class TensorBoard:
    """Scalars and some responses by rollout step.

    A thread of the package writes them, and ends at the first error, which the next call raises.
    Later records go to a new writer, in a new file.
    """

    def __init__(self, run_folder: RunFolder, resumed_after: int | None = None) -> None:
        self._folder = run_folder.tensorboard
        self._writer: SummaryWriter | None = self._opened(None if resumed_after is None else resumed_after + 1)

    def write(self, record: Record) -> None:
        try:
            if self._writer is None:
                self._writer = self._opened()
            _add(self._writer, record)
        except OSError:
            self._writer = None
            raise

    def _opened(self, purge_step: int | None = None) -> "SummaryWriter":
        """Return a new writer; remove its file if there is no room for the head."""
        from torch.utils.tensorboard import SummaryWriter  # half a second of imports

        before = {*self._folder.glob("*")}
        try:
            return SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=10)
        except OSError:
            for file in {*self._folder.glob("*")} - before:
                file.unlink()
            raise

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _WeightsAndBiases:
    """The same scalars and responses, with the config. A resumed run continues the same run there,
    by the id in the run folder.

    Each point names its step: the service's counter never goes back, but the step of a resumed run
    does.
    """

    def __init__(self, config: Config, run_folder: RunFolder, resumed_after: int | None = None) -> None:
        import wandb

        if resumed_after is None or not run_folder.wandb_id.exists():
            write_whole(run_folder.wandb_id, secrets.token_hex(8))
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "megatron_dapo"),
                name=config.trainer.experiment_name,
                id=run_folder.wandb_id.read_text(encoding="utf-8"),
                resume="allow",
                dir=str(run_folder.path),
                config=config.model_dump(mode="json"),
                allow_val_change=True,
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"trainer.logger has wandb, which cannot be started ({error}); run `wandb login`, set "
                "WANDB_MODE=offline, or leave it out."
            ) from error
        self._table = wandb.Table
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        samples = {}
        if record.samples is not None:
            samples["samples"] = self._table(columns=list(COLUMNS), data=[list(row) for row in record.samples.rows])
        self._run.log({"step": record.step, **_scalars(record), **samples})

    def close(self) -> None:
        self._run.finish()


def _add(writer: "SummaryWriter", record: Record) -> None:
    for tag, value in _scalars(record).items():
        writer.add_scalar(tag, value, record.step)
    if record.samples is not None:
        writer.add_text("samples", record.samples.markdown(), record.step)


def _scalars(record: Record) -> dict[str, float]:
    """Return the record's metrics. Seconds of an evaluation get separate names, since its step has
    a record too."""
    if not record.is_validation:
        return record.metrics
    return {name.replace("time/", "time_validation/", 1): value for name, value in record.metrics.items()}


SINKS: dict[str, Callable[[Config, RunFolder, int | None], Sink]] = {
    "console": lambda config, run_folder, resumed_after: Console(
        config.trainer.total_training_steps, SFT_COLUMNS if config.sft.enable else STEP_COLUMNS
    ),
    "jsonl": lambda config, run_folder, resumed_after: _JsonLines(run_folder, resumed_after),
    "tensorboard": lambda config, run_folder, resumed_after: TensorBoard(run_folder, resumed_after),
    "wandb": _WeightsAndBiases,
}


def make_sink(name: str, config: Config, run_folder: RunFolder, resumed_after: int | None) -> Sink:
    """Return the sink of a built-in name, or of a class of the user's own. Raises UserError."""
    if name in SINKS:
        return SINKS[name](config, run_folder, resumed_after)
    make = OwnFunction.load("trainer.logger", name, "package.module:Class")
    return make(
        having("write", "close"), "an object with write and close", "this run", config, run_folder, resumed_after
    )
