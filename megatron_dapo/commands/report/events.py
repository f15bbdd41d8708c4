"""The events of a run besides its steps: starts, resumes, servers lost and back, checkpoints, ends
of processes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.commands.report.values import counted, time_of
from megatron_dapo.common.bounded import read_json
from megatron_dapo.common.ends import EndKind
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.console import duration
from megatron_dapo.telemetry.metrics_file import is_step

_AWAY = 0.99  # servers with the weights, as a share of all: below it, some were away


@dataclass(frozen=True)
class Event:
    """time: seconds since 1970. kind: "start", "resume", "servers", "rejoin", "checkpoint",
    "failure" or "end"."""

    time: float
    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended, of `common.ends`."""

    who: str
    kind: str
    sentence: str
    step: int | None
    time: float
    start: str = ""
    """The start of the run that the process was part of, by its mark."""

    @property
    def is_consequence(self) -> bool:
        """Return whether another process ended first."""
        return self.kind in [kind for kind in EndKind if kind.is_consequence]


def read_ends(folder: Path) -> list[ProcessEnd]:
    """Return the ends of processes, of all starts of the run, by time, without damaged records."""
    ends = []
    for path in sorted(folder.glob("*.json")):
        try:
            fields = read_json(path)
            step, time = fields["step"], time_of(fields["time"])
            if time is not None and (step is None or is_step(step)):
                start = str(fields.get("start", ""))
                ends.append(ProcessEnd(path.stem, str(fields["kind"]), str(fields["sentence"]), step, time, start))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(ends, key=lambda end: end.time)


def events_of(steps: Sequence[dict], ends: Sequence[ProcessEnd], run: RunFolder) -> list[Event]:
    """Return the events of a run by time. steps: its records, evaluations left out."""
    return sorted(
        [*_starts(steps), *_servers(steps), *_checkpoints(steps, run), *_ends(steps, ends)],
        key=lambda event: event.time,
    )


def _starts(steps: Sequence[dict]) -> Iterator[Event]:
    """Yield the starts: only the first record after a start has waited for the servers."""
    for number, step in enumerate(steps):
        begin = step["time"] - (step.get("time/step") or 0.0)
        if number == 0:
            yield Event(begin, step["step"] - 1, "start", "The run started")
        elif "time/start" in step:
            pause = duration(max(0.0, begin - steps[number - 1]["time"]))
            yield Event(begin, step["step"] - 1, "resume", f"Resumed after step {step['step'] - 1}, {pause} after it")


def _servers(steps: Sequence[dict]) -> Iterator[Event]:
    for step in steps:
        current, number = step.get("rollout/num_servers_current"), step.get("rollout/num_servers")
        if current is not None and number and current < _AWAY * number:
            text = f"Step {step['step']}: on average {current:.1f} of {number:.0f} servers had the current weights"
            yield Event(step["time"], step["step"], "servers", text)
        if rejoined := step.get("weight_sync/num_rejoins"):
            text = f"Step {step['step']}: {counted(round(rejoined), 'server')} joined, or joined again"
            yield Event(step["time"], step["step"], "rejoin", text)


def _checkpoints(steps: Sequence[dict], run: RunFolder) -> Iterator[Event]:
    """Yield the checkpoints that still exist."""
    times = {step["step"]: step["time"] for step in steps}
    for step, time in times.items():
        if run.checkpoint(step).is_dir():
            yield Event(time, step, "checkpoint", f"Checkpoint of step {step}")


def _ends(steps: Sequence[dict], ends: Sequence[ProcessEnd]) -> Iterator[Event]:
    last = steps[-1]["step"] if steps else 0
    trainers = [end for end in ends[::-1] if end.who.startswith("trainer-")]
    saved = {end.start: end.time for end in trainers if end.kind == EndKind.SAVED}  # the first of each start
    for end in ends:
        step = last if end.step is None else end.step
        if end.time >= saved.get(end.start, math.inf) and (end.is_consequence or end.kind == EndKind.KILLED):
            continue  # the launcher ended it
        if not EndKind(end.kind).is_good if end.kind in list(EndKind) else True:
            yield Event(end.time, step, "failure", f"{end.who} ended ({end.kind}): {end.sentence}")
        elif end.who == "trainer-rank-0":
            yield Event(end.time, step, "end", "The trainer ended" + (", saved" if end.kind == "saved" else ""))
