"""The run as readable lines: aligned columns, a header now and then, the remaining time."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

STEPS_PER_HEADER = 20
STEPS_FOR_ETA = 10
MAX_TRUNCATED_CORRECT = 0.2  # few cut responses have reached their answer
MAX_CUT = 0.5  # above it a run learns mostly the length


@dataclass(frozen=True)
class Column:
    """A column of the console. A missing metric is a dash."""

    title: str
    width: int
    metrics: tuple[str, ...]
    show: Callable[..., str]

    def cell(self, metrics: dict[str, float]) -> str:
        values = [metrics.get(name) for name in self.metrics]
        text = "-" if any(value is None for value in values) else self.show(*values)
        return text.rjust(self.width)


def _decimals(num: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{num}f}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f}%"


def _small(value: float) -> str:
    return f"{value:.1e}"


def _pair(first: float, second: float) -> str:
    return f"{first:.0f}/{second:.0f}"


COLUMNS = (
    Column("reward", 6, ("reward/mean",), _decimals(3)),
    Column("acc", 5, ("reward/accuracy",), _decimals(3)),
    Column("len", 6, ("response_length/mean",), _decimals(1)),
    Column("entropy", 7, ("actor/entropy",), _decimals(3)),
    Column("KL serv", 8, ("actor/rollout_kl",), _small),
    Column("clip hi", 7, ("actor/on_pg_clipfrac",), _percent),
    Column("clip lo", 7, ("actor/on_pg_clipfrac_lower",), _percent),
    Column("kept/cut", 8, ("dapo/num_kept_groups", "dapo/num_filtered_groups"), _pair),
    Column("tok/s", 6, ("rollout/tokens_per_s",), _decimals(0)),
    Column("roll s", 6, ("time/rollout",), _decimals(1)),
    Column("old s", 5, ("time/old_log_probs",), _decimals(1)),
    Column("upd s", 5, ("time/update",), _decimals(1)),
    Column("sync s", 6, ("time/weight_sync",), _decimals(1)),
    Column("step s", 6, ("time/step",), _decimals(1)),
)


# of a run that fine-tunes on conversations
SFT_COLUMNS = (
    Column("loss", 7, ("train/loss",), _decimals(4)),
    Column("entropy", 7, ("actor/entropy",), _decimals(3)),
    Column("norm", 7, ("actor/grad_norm",), _decimals(3)),
    Column("lr", 7, ("actor/lr",), _small),
    Column("counted", 8, ("data/num_counted_tokens",), _decimals(0)),
    Column("tokens", 8, ("perf/total_num_tokens",), _decimals(0)),
    Column("epoch", 7, ("data/epoch",), _decimals(2)),
    Column("tok/s/rank", 10, ("perf/update_tokens_per_s_per_gpu",), _decimals(0)),
    Column("upd s", 5, ("time/update",), _decimals(1)),
    Column("step s", 6, ("time/step",), _decimals(1)),
)


class StepTable:
    """Turns each step's metrics into a line, with the header before the first and every
    STEPS_PER_HEADER lines."""

    def __init__(self, total_steps: int, columns: Sequence[Column] = COLUMNS) -> None:
        self._columns = columns
        self._total = total_steps
        self._width = 2 * len(str(total_steps)) + 1
        self._num_lines = 0
        self._recent: deque[float] = deque(maxlen=STEPS_FOR_ETA)

    def line(self, step: int, metrics: dict[str, float]) -> str:
        if "time/step" in metrics:
            self._recent.append(metrics["time/step"])
        cells = [f"{step}/{self._total}".rjust(self._width), *(column.cell(metrics) for column in self._columns)]
        line = "  ".join([*cells, self._eta(step).rjust(6)])
        self._num_lines += 1
        return line if (self._num_lines - 1) % STEPS_PER_HEADER else f"{self.header()}\n{line}"

    def header(self) -> str:
        titles = [column.title.rjust(column.width) for column in self._columns]
        return "  ".join(["step".rjust(self._width), *titles, "left".rjust(6)])

    def _eta(self, step: int) -> str:
        if not self._recent:
            return "-"
        return duration((self._total - step) * sum(self._recent) / len(self._recent))


@dataclass(frozen=True)
class _RunFigure:
    """One figure of the whole run."""

    text: str
    """Its format."""
    metric: str
    over_steps: Callable[[list[float]], float]
    """Aggregates the steps' values."""


RUN_FIGURES = (
    _RunFigure("MFU {:.1%}", "perf/mfu/actor", fmean),
    _RunFigure("{:.0f} tokens/s/rank trained", "perf/update_tokens_per_s_per_gpu", fmean),
    _RunFigure("{:.0f} sampled", "perf/rollout_tokens_per_s_per_gpu", fmean),
    _RunFigure("memory {:.1f} GiB", "perf/max_memory_allocated_gb", max),
    _RunFigure("reserved {:.1f} GiB", "perf/max_memory_reserved_gb", max),
    _RunFigure("KV cache {:.0%}", "rollout/kv_used_max", max),
    _RunFigure("{:.0f} retractions", "rollout/num_retractions", sum),
    _RunFigure("{:.0f} cached tokens", "rollout/num_cached_tokens", sum),
    _RunFigure("servers wait {:.0%}", "rollout/servers_waiting", fmean),
    _RunFigure("trainer waits {:.0%}", "perf/trainer_waiting", fmean),
    _RunFigure("longest response {:.0f}", "response_length/max", max),
)


class RunLine:
    """Makes the last line of a run: how well its steps used their machines."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: dict[str, float]) -> None:
        """Count a step."""
        for figure in RUN_FIGURES:
            if figure.metric in metrics:
                self._values.setdefault(figure.metric, []).append(metrics[figure.metric])

    def line(self) -> str | None:
        """Return the reported figures, or None."""
        figures = [figure for figure in RUN_FIGURES if figure.metric in self._values]
        texts = [figure.text.format(figure.over_steps(self._values[figure.metric])) for figure in figures]
        return "all steps: " + "   ".join(texts) if texts else None


def validation_line(step: int, metrics: dict[str, float]) -> str:
    """Return a line such as "held out, after step 40: accuracy 0.985   length 20.7   200 prompts
    3.1 s"."""
    parts = (
        ("loss {:.4f}", "val/loss"),
        ("accuracy {:.3f}", "val/accuracy"),
        ("length {:.1f}", "val/response_length_mean"),
        ("truncated {:.1%}", "val/truncation_ratio"),
        ("{:.0f} prompts", "val/num_prompts"),
        ("{:.1f} s", "val/seconds"),
    )
    when = "before the first step" if step == 0 else f"after step {step}"
    return f"held out, {when}: " + "   ".join(text.format(metrics[name]) for text, name in parts if name in metrics)


def paid_without_answer(share: float | None) -> str | None:
    """Return a warning if too large a share of the truncated responses is judged right
    (reward/truncated_correct), else None."""
    if share is None or share <= MAX_TRUNCATED_CORRECT:
        return None
    return (
        f"{share:.0%} of the truncated responses are judged right, though most of them end before their answer: read "
        f"some, and correct reward.function or the ground truths."
    )


def _mostly_cut(share: float) -> str | None:
    """Return a warning if most of the sampled responses, or of the held-out answers, are cut; else
    None."""
    if share <= MAX_CUT:
        return None
    return (
        f"{share:.0%} of the responses are cut, most of them before their answer: raise data.max_response_length, or "
        f"have the model answer in fewer tokens."
    )


WARNINGS: tuple[tuple[str, Callable[[float], str | None]], ...] = (
    ("dapo/truncation_ratio", _mostly_cut),
    ("val/truncation_ratio", _mostly_cut),
    ("reward/truncated_correct", paid_without_answer),
)
"""Metric -> its warning, shown once until it is cured."""


def warnings_of(metrics: Mapping[str, float]) -> Iterator[tuple[str, str | None]]:
    """Yield (metric, its warning, or None) for each metric with one."""
    for metric, words_of in WARNINGS:
        if metric in metrics:
            yield metric, words_of(metrics[metric])
    for metric, num_seats in metrics.items():
        if metric.startswith("rollout/seats/"):
            server = metric.removeprefix("rollout/seats/")
            factor = metrics[f"rollout/factor/{server}"]
            words = f"server {server} takes {factor:.1f} times as long for a token as the others; it gets no requests."
            yield metric, None if num_seats else words


def progress(total: int, what: str = "steps", has_left: bool = True):
    """Return a started rich progress bar with the elapsed time; the caller stops it. has_left: also
    show the remaining time, for uses without a line above the bar."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn(what),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *((TextColumn("left"), TimeRemainingColumn()) if has_left else ()),
        transient=True,
        refresh_per_second=1,  # the thread that draws takes time from training
    )
    bar.add_task(what, total=total)
    bar.start()
    return bar


def duration(seconds: float) -> str:
    """Return the time in at most two units: 42s, 3m07s, 2h05m.

    An infinite or NaN time is a dash.
    """
    if not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if whole < 60:
        return f"{whole}s"
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
