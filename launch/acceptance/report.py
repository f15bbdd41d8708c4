"""The report of a climb: report.json for programs, report.md for people, and a line per rung on the
terminal."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from launch.acceptance.rung import Number
from megatron_dapo.common.files import write_whole
from megatron_dapo.common.log_lines import read_lines

GREEN, RED, SKIPPED, NOT_REACHED = "green", "red", "skipped", "not reached"
_TAIL_LINES = 30


@dataclass(frozen=True)
class RungResult:
    """The result of a rung."""

    name: str
    question: str
    state: str
    text: str
    """Its verdict, or why it has none."""
    seconds: float
    limit_s: float
    log: str = ""
    """Of its programs."""
    commands: Sequence[str] = ()
    """Its programs."""
    numbers: Mapping[str, Number] = field(default_factory=dict)

    def line(self) -> str:
        """Return the result as one line for the terminal."""
        return f"{self.state:<11}  {self.name:<11}  {self.seconds:>5.0f} s  {self.text}"


def summary(results: Sequence[RungResult]) -> str:
    """Return the verdict on the machine, one line."""
    total = f"{sum(result.seconds for result in results):.0f} s"
    for result in results:
        if result.state == RED:
            return f"RED at {result.name} after {total}: {result.text}"
    missing = ", ".join(result.name for result in results if result.state == NOT_REACHED)
    if results[-1].state == NOT_REACHED:
        return f"NOT ACCEPTED after {total}: green so far, without {missing}"
    if missing:
        first = next(result.name for result in results if result.state != NOT_REACHED)
        return f"GREEN from {first} on in {total}, not a whole acceptance: without {missing}"
    skipped = ", ".join(result.name for result in results if result.state == SKIPPED)
    return f"ACCEPTED in {total}" + (f"; skipped: {skipped}" if skipped else "")


def write_report(folder: Path, results: Sequence[RungResult], sizes: Mapping[str, object]) -> None:
    """Write report.json and report.md whole: after every rung, so that a broken-off climb has one
    too."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    content = {
        "format": 1,
        "time": time,
        "is_accepted": all(result.state in (GREEN, SKIPPED) for result in results),
        "summary": summary(results),
        "sizes": sizes,
        "rungs": [asdict(result) for result in results],
    }
    write_whole(folder / "report.json", json.dumps(content, indent=1) + "\n")
    write_whole(folder / "report.md", _page(results, time))


def _page(results: Sequence[RungResult], time: str) -> str:
    rows = [
        f"| {result.name} | {result.state} | {result.seconds:.0f} | {result.limit_s:.0f} | {_cell(result.text)} |"
        for result in results
    ]
    table = ["| rung | | s | limit, s | verdict |", "|---|---|---|---|---|", *rows]
    sections = [part for result in results if result.commands for part in _section(result)]
    return "\n".join(["# Acceptance", "", f"**{_cell(summary(results))}** ({time})", "", *table, "", *sections])


def _section(result: RungResult) -> list[str]:
    lines = [f"## {result.name}", "", f"{result.question} {result.state.capitalize()}: {result.text}", ""]
    if result.numbers:
        lines += ["| | |", "|---|---|"]
        lines += [f"| {name} | {_number(value)} |" for name, value in result.numbers.items()]
        lines += [""]
    lines += [f"Log: `{result.log}`", "", *(f"    {command}" for command in result.commands), ""]
    if result.state == RED:
        lines += ["The log ends with:", ""]
        lines += [*(f"    {line}" for line in read_lines(Path(result.log))[-_TAIL_LINES:]), ""]
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _number(value: Number) -> str:
    return f"{value:.6g}" if isinstance(value, float) else _cell(str(value))
