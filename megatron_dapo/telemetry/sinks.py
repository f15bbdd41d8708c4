"""The sinks of metrics, by the names of `trainer.logger`."""

import json
import math
import os
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Protocol

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.common.own_function import OwnFunction, having
from megatron_dapo.common.standard_streams import mute, print_line
from megatron_dapo.config.keys import known_keys
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

_MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds per try, not minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # the only store without server or database
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # a URL may hold a password
}
_MLFLOW_END_S = 60.0


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

        id_file = run_folder.logger_id("wandb")
        if resumed_after is None or not id_file.exists():
            write_whole(id_file, secrets.token_hex(8))
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "megatron_dapo"),
                name=config.trainer.experiment_name,
                id=id_file.read_text(encoding="utf-8"),
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


class _MLflow:
    """The same scalars, and the config as parameters. A resumed run continues the same run there,
    by the id in the run folder.

    A thread sends them, so that no step waits for a silent server.
    """

    def __init__(self, config: Config, run_folder: RunFolder, resumed_after: int | None = None) -> None:
        for name, value in _MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)
        import mlflow

        self._metric = mlflow.entities.Metric
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or (run_folder.path.resolve() / "mlflow").as_uri()
        id_file = run_folder.logger_id("mlflow")
        try:
            self._client = client = mlflow.MlflowClient(self._uri)
            if resumed_after is None or not id_file.exists():
                name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megatron_dapo")
                experiment = client.get_experiment_by_name(name)
                experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
                run_id = client.create_run(experiment_id, run_name=config.trainer.experiment_name).info.run_id
                values = {key: str(reduce(getattr, key.split("."), config)) for key in known_keys()}
                client.log_batch(run_id, params=[mlflow.entities.Param(*each) for each in values.items()])
                write_whole(id_file, run_id)
        except Exception as error:
            raise UserError(
                f"trainer.logger has mlflow, which cannot be started ({self._told(error)}); correct "
                "MLFLOW_TRACKING_URI, unset it for a folder in the run folder, or leave mlflow out."
            ) from None
        self._run_id = id_file.read_text(encoding="utf-8")
        self._unsent: deque[list] = deque(maxlen=1000)
        self._thread = ThreadPoolExecutor(1, "mlflow")
        self._thread.submit(client.update_run, self._run_id, "RUNNING")
        self._sending: Future[None] = Future()
        self._sending.set_result(None)
        self._error: BaseException | None = None  # of the newest attempt that ended

    def write(self, record: Record) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(_mlflow_name(name), x, now_ms, record.step) for name, x in _scalars(record).items()]
        self._unsent.append(metrics)
        if self._sending.done():
            self._error, self._sending = self._sending.exception(), self._thread.submit(self._send)
        if self._error is not None:
            raise OSError(self._told(self._error))

    def close(self) -> None:
        self._thread.submit(self._send)
        status = "FAILED" if sys.exception() else "FINISHED"
        last = self._thread.submit(self._client.set_terminated, self._run_id, status)
        try:
            error = last.exception(_MLFLOW_END_S)  # or TimeoutError, which is an OSError
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if error is not None:
            raise OSError(self._told(error))

    def _send(self) -> None:
        while self._unsent:
            self._client.log_batch(self._run_id, self._unsent[0])
            self._unsent.popleft()

    def _told(self, error: BaseException) -> str:
        """Return an error on one line, without the server's address, which may hold a password."""
        return " ".join(str(error).replace(self._uri, "MLFLOW_TRACKING_URI").split())[:500]


def _mlflow_name(name: str) -> str:
    """Return the name with `_at_` for `@`, and `_` for all else that MLflow refuses."""
    allowed = re.sub(r"[^\w/. :-]", "_", name.replace("@", "_at_"))[:250]
    return "/".join(part if part.strip(".") else "_" for part in allowed.split("/"))


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
    "mlflow": _MLflow,
}


def make_sink(name: str, config: Config, run_folder: RunFolder, resumed_after: int | None) -> Sink:
    """Return the sink of a built-in name, or of a class of the user's own. Raises UserError."""
    if name in SINKS:
        return SINKS[name](config, run_folder, resumed_after)
    make = OwnFunction.load("trainer.logger", name, "package.module:Class")
    return make(
        having("write", "close"), "an object with write and close", "this run", config, run_folder, resumed_after
    )
