"""Summarizes a run: reads metrics.jsonl and makes the closing table."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.telemetry.console import duration
from megatron_dapo.telemetry.metrics_file import MAX_BYTES, records_of

PHASE_TITLES = {
    "start": "waiting for the servers",
    "rollout": "sampling",
    "distribute": "distributing samples",
    "old_log_probs": "old log-probs",
    "ref_log_probs": "reference log-probs",
    "values": "values of the critic",
    "update_critic": "critic update",
    "update": "policy update",
    "weight_sync": "weights to servers",
    "validation": "held-out evaluation",
    "checkpoint": "checkpoints",
}
WINDOW = 10  # steps averaged at either end

ROWS = (
    ("mean reward", "reward/mean", "{:.3f}"),
    ("accuracy, sampled", "reward/accuracy", "{:.3f}"),
    ("response length (tokens)", "response_length/mean", "{:.1f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("value loss", "critic/vf_loss", "{:.3f}"),
    ("explained variance", "critic/explained_variance", "{:.3f}"),
)


def read_metrics(path: Path, max_bytes: int = MAX_BYTES) -> list[dict]:
    """Return the records of metrics.jsonl, in order; other lines are left out. Raises like
    `records_of`.

    If a step is repeated (in a resumed or repeated run), the later record counts, and those after
    the earlier one do not.
    """
    records: list[dict] = []
    for record in filter(None, (record for _, record in records_of(path, max_bytes))):
        while records and _place(records[-1]) >= _place(record):
            records.pop()
        records.append(record)
    return records


def is_validation(record: dict) -> bool:
    return "val/accuracy" in record or "val/loss" in record


def has_validation(path: Path, step: int) -> bool:
    """Return whether the file has a record of the held-out evaluation with the weights after this
    step."""
    if not path.exists():
        return False
    return any(record["step"] == step and is_validation(record) for _, record in records_of(path) if record)


def _place(record: dict) -> tuple[int, bool]:
    """Return the record's place in the order of steps. Within a step the evaluation comes last."""
    return record["step"], is_validation(record)


@dataclass(frozen=True)
class ServerLosses:
    """The cost of absent servers."""

    num_rejoins: int
    num_steps_away: int
    """Steps with servers behind the current weights for more than 1 % of the time."""
    tokens_per_s: float | None
    """Generated tokens of full steps, without the wait for the servers' start; None without such a
    step."""
    tokens_per_s_away: float | None

    @classmethod
    def of(cls, steps: list[dict]) -> "ServerLosses | None":
        """Return the losses of these steps, or None if no server was away."""
        steps = [step for step in steps if {"rollout/num_servers_current", "rollout/num_servers"} <= step.keys()]
        are_away = [step["rollout/num_servers_current"] < 0.99 * step["rollout/num_servers"] for step in steps]
        away = [step for step, is_away in zip(steps, are_away, strict=True) if is_away]
        num_rejoins = int(sum(step.get("weight_sync/num_rejoins", 0) for step in steps))
        if not away and not num_rejoins:
            return None
        full = [step for step, is_away in zip(steps, are_away, strict=True) if not is_away]
        return cls(num_rejoins, len(away), _tokens_per_s(full), _tokens_per_s(away))


@dataclass(frozen=True)
class Summary:
    """A run's figures. Means are over the first and the last min(10, half) steps; None for metrics
    never reported."""

    num_steps: int
    window: int
    first: dict[str, float | None]
    last: dict[str, float | None]
    val_before: float | None
    val_after: float | None
    seconds: dict[str, float]  # per phase, over the whole run, with the rest as "other"
    losses: ServerLosses | None = None

    @classmethod
    def of(cls, records: list[dict]) -> "Summary":
        steps = [record for record in records if not is_validation(record)]
        accuracies = [(record["step"], record["val/accuracy"]) for record in records if "val/accuracy" in record]
        window = max(1, min(WINDOW, len(steps) // 2))
        names = [name for _, name, _ in ROWS]
        return cls(
            num_steps=len(steps),
            window=window,
            first={name: _mean(steps[:window], name) for name in names},
            last={name: _mean(steps[-window:], name) for name in names},
            val_before=accuracies[0][1] if accuracies and accuracies[0][0] == 0 else None,
            val_after=accuracies[-1][1] if accuracies and accuracies[-1][0] > 0 else None,
            seconds=_seconds(records),
            losses=ServerLosses.of(steps),
        )


def closing_table(summary: Summary) -> str:
    """Return an aligned table of the figures before and after, and of the time spent. No newline at
    the end."""
    rows = [
        (title, summary.first[name], summary.last[name], text)
        for title, name, text in ROWS
        if summary.first[name] is not None
    ]
    lines = [_row("", "before", "after")]
    lines.append(_row("held-out accuracy", *map(_shown("{:.3f}"), (summary.val_before, summary.val_after))))
    lines += ["", _row("", f"first {summary.window}", f"last {summary.window} of {summary.num_steps} steps")]
    lines += [_row(title, _shown(text)(first), _shown(text)(last)) for title, first, last, text in rows]

    if summary.losses is not None:
        lines += ["", *_losses(summary.losses)]

    total = sum(summary.seconds.values())
    lines += ["", _row("where the time went", "seconds", "share")]
    for phase, seconds in sorted(summary.seconds.items(), key=lambda item: -item[1]):
        lines.append(_row(f"  {PHASE_TITLES.get(phase, phase)}", f"{seconds:.1f}", f"{seconds / total:.0%}"))
    lines.append(_row("  together", f"{total:.1f}", duration(total)))
    return "\n".join(lines)


def _losses(losses: ServerLosses) -> list[str]:
    shown = _shown("{:.0f}")
    loss = ""
    if losses.tokens_per_s and losses.tokens_per_s_away is not None:
        loss = f"{losses.tokens_per_s_away / losses.tokens_per_s - 1:+.0%}"
    return [
        _row("servers that joined again", str(losses.num_rejoins), ""),
        _row("tokens/s, all servers there", shown(losses.tokens_per_s), ""),
        _row("  some away", shown(losses.tokens_per_s_away), f"{loss} in {losses.num_steps_away} steps".lstrip()),
    ]


def _tokens_per_s(steps: list[dict]) -> float | None:
    seconds = sum(step.get("time/step", 0.0) - step.get("time/start", 0.0) for step in steps)
    return sum(step.get("rollout/num_tokens", 0) for step in steps) / seconds if seconds else None


def _row(title: str, first: str, second: str) -> str:
    return f"{title:<28}{first:>10}   {second:<}".rstrip()


def _shown(text: str):
    return lambda value: "-" if value is None else text.format(value)


def _mean(records: list[dict], name: str) -> float | None:
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(values) / len(values) if values else None


def _seconds(records: list[dict]) -> dict[str, float]:
    seconds: Counter[str] = Counter()
    for record in records:
        phases = {name.removeprefix("time/"): value for name, value in record.items() if name.startswith("time/")}
        whole = phases.pop("step", sum(phases.values()))
        seconds.update(phases)
        seconds["other"] += max(0.0, whole - sum(phases.values()))
    return dict(seconds)
