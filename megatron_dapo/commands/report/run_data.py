"""Reads a run folder for the page, without the answers: metrics by name, phases, facts, config,
events."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.commands.report.events import Event, ProcessEnd, events_of, read_ends
from megatron_dapo.commands.report.panels import derived
from megatron_dapo.commands.report.values import counted, number, signed, time_of
from megatron_dapo.common.bounded import parse_json, read_bytes
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.yaml_dialect import parse_yaml
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.closing_table import ROWS, Summary, is_validation, read_metrics
from megatron_dapo.telemetry.console import duration, paid_without_answer
from megatron_dapo.telemetry.metrics_file import is_step

_DIGITS = 6
# bytes: records take ten times as much here, and the page carries them all
_MAX_METRICS = 256 << 20
_MAX_FILE = 1 << 20  # bytes of config.yaml and machine.json
MAX_RUNS = 20  # of a folder of runs
_MAX_NAMES = 2000  # of metrics
_MAX_PLACES = 20_000_000  # of a table: records times metrics
Table = dict[str, list[float | None]]
"""Name -> one value per record, or None; "step" and "time" (seconds since 1970) are complete."""


@dataclass(frozen=True)
class RunData:
    """The content of a run folder."""

    name: str
    folder: Path
    steps: Table
    """Of the records."""
    validations: Table
    """Of the records."""
    phases: Table
    """Seconds per step; "other" is the time outside all phases."""
    facts: tuple[tuple[str, str], ...]
    """(name, value) for people."""
    state: str
    """"done", "saved", "running" or "failed"."""
    sentence: str
    """Explains the state."""
    config: dict[str, Any]
    """The resolved one, flat."""
    events: tuple[Event, ...]

    def for_page(self) -> dict:
        """Return it as the page reads it."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "steps": self.steps,
            "validations": self.validations,
            "phases": self.phases,
            "facts": self.facts,
            "state": self.state,
            "sentence": self.sentence,
            "events": [asdict(event) for event in self.events],
        }


def read_run(folder: Path) -> RunData:
    """Return the content of a run folder. Raises UserError for any other folder; missing or damaged
    files are left out."""
    run = RunFolder(folder)
    try:
        records = _with_times([_numbers(record) for record in read_metrics(run.metrics, _MAX_METRICS)])
    except OSError as error:
        raise UserError(f"{folder} is no folder of a run: {run.metrics} cannot be read ({error.strerror}).") from error
    steps = [record for record in records if not is_validation(record)]
    config = read_config(run.config)
    ends = read_ends(run.ends)
    state, sentence = _outcome(steps, config.get("trainer.total_training_steps"), ends)
    return RunData(
        name=name_of(folder),
        folder=folder,
        steps=_table([record | derived(record) for record in steps]),
        validations=_table([record for record in records if is_validation(record)]),
        phases=_phases(steps),
        facts=tuple(_facts(records, steps, config, _read(run.machine, parse_json))),
        state=state,
        sentence=sentence,
        config=config,
        events=tuple(events_of(steps, ends, run)),
    )


def read_config(path: Path) -> dict[str, Any]:
    """Return a config's values by their keys; {} if the file is missing or damaged."""
    return _flat(_read(path, _yaml))


def runs_in(folders: Iterable[Path]) -> list[Path]:
    """Return these runs, and in place of a folder of runs its newest MAX_RUNS, by name."""
    runs: list[Path] = []
    for folder in folders:
        files = [] if RunFolder(folder).metrics.exists() else folder.glob(f"*/{RunFolder(folder).metrics.name}")
        known = [(file.stat().st_mtime, file.parent) for file in files if file.is_file()]
        runs += sorted(run for _, run in sorted(known)[-MAX_RUNS:]) or [folder]
    return runs


def name_of(folder: Path) -> str:
    """Return the run's name from its folder, even for `.` or a link."""
    return Path(os.path.realpath(folder)).name


def _numbers(record: dict) -> dict:
    """Return a record's numbers, without an invalid time."""
    kept = {name: value for name, value in record.items() if number(value) is not None}
    if time_of(kept.get("time")) is None:
        kept.pop("time", None)
    return kept


def _with_times(records: list[dict]) -> list[dict]:
    """Give a record without a time the previous record's; the first ones get the first time."""
    time = next((record["time"] for record in records if "time" in record), 1.0)
    for record in records:
        time = record.setdefault("time", time)
    return records


def _table(records: Sequence[dict]) -> Table:
    """Return the records by name, limited to the first names if there are too many.

    Those of servers come last: each requeue of a job brings new ones.

    A value of another type than numbers becomes None.
    """
    names = [*dict.fromkeys(name for record in records for name in ("step", "time", *record))]
    names.sort(key=lambda name: name.startswith(("rollout/factor/", "rollout/seats/")))
    names = names[: min(_MAX_NAMES, max(2, _MAX_PLACES // max(1, len(records))))]
    return {name: [_rounded(record.get(name), name) for record in records] for name in names}


def _rounded(value: Any, name: str) -> float | None:
    value = number(value)
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) and name != "time" else value


def _phases(steps: Sequence[dict]) -> Table:
    """Return the seconds of each phase in every step, without empty phases."""
    rows = []
    for step in steps:
        row = {name.removeprefix("time/"): value for name, value in step.items() if name.startswith("time/")}
        whole = row.pop("step", sum(row.values()))
        rows.append(row | {"other": max(0.0, whole - sum(row.values()))})
    return {name: values for name, values in _table(rows).items() if name not in ("step", "time") and any(values)}


def _outcome(steps: Sequence[dict], total: Any, ends: Sequence[ProcessEnd]) -> tuple[str, str]:
    """Return the state of the run and a sentence about it."""
    last = steps[-1] if steps else {"step": 0, "time": 0.0}
    total = total if is_step(total) else None
    done = f"{last['step']} of {counted(total, 'step')} done" if total else f"{counted(last['step'], 'step')} done"
    of_trainer = [end for end in ends if end.time >= last["time"] and end.who.startswith("trainer-")]
    newest = [end for end in of_trainer if end.start == of_trainer[-1].start]  # an earlier start's may be left
    if any(end.kind == "saved" for end in newest):  # all ranks save together
        return "saved", f"{done}; the run was asked to stop, and is saved"
    bad = [end for end in newest if end.kind != "done"]
    if bad:
        first = min(bad, key=lambda end: (end.is_consequence, end.time))
        return "failed", f"{done}; {first.who} ended ({first.kind}): {first.sentence or 'it left no sentence'}"
    if total and last["step"] >= total:
        return "done", f"{done}"
    return "running", f"{done}; no end is recorded: the run goes on, or was killed"


def _facts(records: Sequence[dict], steps: Sequence[dict], config: dict, machine: dict) -> Iterable[tuple[str, str]]:
    if machine:
        memory = f", {machine['gpu_memory_gib']} GiB" if machine.get("gpu_memory_gib") else ""
        device = machine.get("cpu") if machine.get("device") == "cpu" else f"{machine.get('device')}{memory}"
        yield "Trainer", f"{counted(machine.get('trainer_ranks'), 'rank')} on {device}"
    if isinstance(versions := machine.get("versions"), dict):
        yield "Software", ", ".join(f"{name} {version}" for name, version in versions.items())
    if steps and steps[-1].get("rollout/num_servers"):
        yield "Servers", f"{steps[-1]['rollout/num_servers']:.0f}"
    if config.get("actor_rollout_ref.model.path"):
        yield "Model", str(config["actor_rollout_ref.model.path"])
    if not steps:
        return
    seconds = sum(step.get("time/step") or 0.0 for step in steps)
    yield "Time in steps", f"{duration(seconds)} ({seconds / len(steps):.1f} s per step)"
    tokens = sum(step.get("perf/total_num_tokens") or 0.0 for step in steps)
    yield "Tokens trained on", f"{tokens:,.0f}"
    if paid := paid_without_answer(_truncated_correct(steps)):
        yield "Reward", paid
    summary = Summary.of(list(records))
    if summary.val_after is not None:
        before = "\u2013" if summary.val_before is None else f"{summary.val_before:.3f}"
        yield "Held-out accuracy", f"{before} \u2192 {summary.val_after:.3f}"
    for title, name, text in ROWS:
        first, last = summary.first[name], summary.last[name]
        if first is not None and last is not None:
            yield title[0].upper() + title[1:], f"{signed(text.format(first))} \u2192 {signed(text.format(last))}"


def _truncated_correct(steps: Sequence[dict]) -> float | None:
    """Return the share of right ones among the run's truncated responses; None without any."""
    names = ("reward/truncated_correct", "dapo/num_truncated_samples")
    pairs = [tuple(number(step.get(name)) for name in names) for step in steps]
    counted = [(share, count) for share, count in pairs if share is not None and count]
    return sum(share * count for share, count in counted) / sum(count for _, count in counted) if counted else None


def _read(path: Path, parse) -> dict:
    """Return the content of a file; {} if it is missing or damaged."""
    try:
        content = parse(read_bytes(path, _MAX_FILE).decode("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _yaml(text: str) -> Any:
    return parse_yaml(text)[0]


def _flat(section: dict, prefix: str = "") -> dict[str, Any]:
    """Return a tree of sections as {"a.b.c": value}."""
    values: dict[str, Any] = {}
    for key, value in section.items():
        values |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return values


def config_rows(runs: Sequence[RunData]) -> list[dict]:
    """Return the keys that some run has set to another value than the default, differing ones
    first."""
    default = _flat(Config().model_dump(mode="json"))
    keys = sorted({key for run in runs for key, value in run.config.items() if value != default.get(key)})
    rows: list[dict[str, Any]] = [
        {"key": key, "default": shown(default.get(key)), "values": [shown(run.config.get(key)) for run in runs]}
        for key in keys
    ]
    rows = [row | {"differs": len(set(row["values"])) > 1} for row in rows]
    return sorted(rows, key=lambda row: (not row["differs"], row["key"]))


def shown(value: Any) -> str:
    """Return a config's value as text."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
