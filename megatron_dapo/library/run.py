"""Reads a run folder: metrics as columns, responses, and their tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.commands.report.answers import HELD_OUT, TRAINED, StepFile
from megatron_dapo.commands.report.values import number
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.token_dump import TokenDump
from megatron_dapo.storage.run_folder import RunFolder, rollout_steps
from megatron_dapo.telemetry.closing_table import is_validation, read_metrics


class Metrics(dict[str, np.ndarray]):
    """Columns by name, a row per record: "step" is int64, all others are float64, NaN where a
    record lacks the name."""

    def to_pandas(self) -> Any:
        """Return the columns as a DataFrame, by step. Raises UserError if pandas is not
        installed."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas needs pandas, which is not installed; run pip install pandas.") from error
        return pandas.DataFrame(self).set_index("step")


def _columns(records: Sequence[dict[str, Any]]) -> Metrics:
    """Return the columns of records of metrics.jsonl. A name without any number is left out."""
    columns = {name: np.full(len(records), np.nan) for record in records for name in record}
    for row, record in enumerate(records):
        for name, value in record.items():
            if (known := number(value)) is not None:
                columns[name][row] = known
    named = {name: column for name, column in columns.items() if name != "step" and not np.isnan(column).all()}
    return Metrics({"step": np.array([record["step"] for record in records], dtype=np.int64)} | named)


class Run:
    """A run's folder, of a finished or an active run. Every call reads the files anew."""

    def __init__(self, path: str | Path) -> None:
        """Take the folder. Raises UserError if it is no folder of a run."""
        self.path = Path(path)
        self._folder = RunFolder(self.path)
        metrics, config = self._folder.metrics, self._folder.config  # without jsonl in trainer.logger no metrics
        if not metrics.is_file() and not config.is_file():
            raise UserError(f"{path} is no folder of a run: it has no {metrics.name} and no {config.name}.")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def config(self) -> Config:
        """Return the config with every key. Raises UserError if this version does not know it."""
        return load_config(self._folder.config)

    def metrics(self) -> Metrics:
        """Return the metrics of the steps, a row per step. docs/metrics.md explains the names."""
        return _columns([record for record in self._records() if not is_validation(record)])

    def validations(self) -> Metrics:
        """Return the metrics of the held-out evaluations, a row for each; step 0 is before
        training."""
        return _columns([record for record in self._records() if is_validation(record)])

    def steps(self, *, held_out: bool = False) -> list[int]:
        """Return the steps with responses, ascending. held_out: those with an evaluation's."""
        return rollout_steps(self._file(0, held_out).parent)

    def samples(self, step: int, *, held_out: bool = False) -> list[dict[str, Any]]:
        """Return the responses kept of a step, one after the other.

        Each has the keys of its line in the file (text, reward, raw_reward, correct, num_tokens,
        finish_reason ...) and of its group (uid, prompt, ground_truth). Of a training step these
        are the first groups only (`rollout.dump_samples`). Damaged lines are left out.

        held_out: the answers of the evaluation after this step. Raises UserError for a step without
        responses.
        """
        if step not in (steps := self.steps(held_out=held_out)):
            known = f"it has some of {len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "it has none"
            raise UserError(f"{self.path} has no {'held-out ' * held_out}responses of step {step}: {known}.")
        groups = StepFile(HELD_OUT if held_out else TRAINED, step, self._file(step, held_out)).groups()
        return [
            {name: value for name, value in group.items() if name != "responses"} | response
            for group in groups
            for response in group["responses"]
        ]

    def tokens(self, step: int) -> list[dict[str, Any]]:
        """Return the arrays [T] of each response, in the order of `samples`; of an agent's response
        one for each of its branches.

        tokens, loss_mask (1: written by the model), weight_versions, rollout_log_probs (by the
        server), log_prob_diffs (trainer - server), advantages; and texts, a list of T strings. NaN
        is unknown. Raises UserError if the file is missing or damaged.
        """
        path = self._folder.rollout_tokens(step)
        dump = TokenDump.read(path)
        if dump is None:
            raise UserError(f"{path} is missing or damaged: the tokens of step {step} are unknown.")
        ends = np.cumsum(dump.lengths)[:-1]
        parts = {name: np.split(array, ends) for name, array in vars(dump).items() if name not in ("lengths", "texts")}
        rows = [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)][: len(dump.lengths)]
        return [row | {"texts": [dump.texts[token] for token in row["tokens"].tolist()]} for row in rows]

    def _file(self, step: int, held_out: bool) -> Path:
        return self._folder.validation(step) if held_out else self._folder.rollout(step)

    def _records(self) -> list[dict]:
        try:
            return read_metrics(self._folder.metrics)
        except OSError as error:
            raise UserError(f"{self._folder.metrics} cannot be read ({error.strerror or error}).") from error
