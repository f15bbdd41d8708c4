"""The result of a benchmark: a table on the terminal, and JSON with date, hardware and versions."""

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import clock

SCHEMA = 1
PACKAGES = (
    "torch triton megatron-core liger-kernel cut-cross-entropy verl transformer-engine flash-attn megatron_dapo"
).split()


@dataclass
class Row:
    """One implementation at one shape. None: no such number.

    There is no backward pass, no log-prob, or not enough memory.
    """

    provider: str
    entropy: bool
    forward_s: float | None = None
    backward_s: float | None = None
    total_s: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)  # total time over a yardstick's
    peak_bytes: int | None = None
    errors: dict[str, float] = field(default_factory=dict)  # against float64
    counts: dict[str, int] = field(default_factory=dict)
    failure: str | None = None


@dataclass
class ShapeResult:
    """All rows of one shape."""

    shape: dict
    dtype: str
    rounds: int
    yardsticks: dict[str, float]  # name -> seconds (median)
    rows: list[Row]


def hardware(device: torch.device) -> dict[str, object]:
    """Return a description of the hardware, without the machine's name."""
    description: dict[str, object] = {
        "device": device.type,
        "cpu": _cpu_model(),
        "cpu_features": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "clock": clock(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        description |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return description


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def commit() -> str | None:
    """Return the commit of this repository, with + after changes; None outside of one."""
    here = Path(__file__).parent
    commands = (["git", "rev-parse", "--short=12", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        name, changes = (
            subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+" if changes else "")


def written(
    benchmark: str, device: torch.device, results: Sequence[dict], path: Path | None, **more: object
) -> dict[str, object]:
    """Return a benchmark's results with their place and time, and write them to the path, if any.

    A test reads them.
    """
    content = {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(device),
        "versions": versions(),
        "results": list(results),
        **more,
    }
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        print(f"written: {path}")
    return content


def plain_table(title: str, columns: Sequence[str]) -> Table:
    """Return a table with the first column on the left, the others on the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def show(benchmark: str, result: ShapeResult, unit: str = "ms") -> None:
    """Print one line per row: times, ratios to the yardsticks, memory, errors; full width."""
    scale = {"s": 1, "ms": 1e3, "us": 1e6}[unit]
    shape = result.shape
    sizes = ", ".join(f"{key} {shape[name]}" for key, name in SIZES if name in shape)
    yardsticks = "   ".join(f"{name} {seconds * scale:.4g} {unit}" for name, seconds in result.yardsticks.items())
    table = Table(
        title=f"{benchmark}, {shape['name']}: {sizes}, {result.dtype}\n{yardsticks}   (median of {result.rounds})",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    ratio_names = _keys(result.rows, "ratios")
    error_names = [name for name in _keys(result.rows, "errors") if not name.endswith("_mean")]
    count_names = _keys(result.rows, "counts")
    table.add_column("")
    phases = [name for name in ("forward_s", "backward_s") if any(getattr(row, name) for row in result.rows)]
    times = [f"{name.removesuffix('_s')}\n{unit}" for name in phases]
    for title in (*times, *(f"/ {name}" for name in ratio_names), "peak\nMiB"):
        table.add_column(title, justify="right")
    for name in (*count_names, *(name.rpartition("_")[0].replace("_", " ") + "\nerror" for name in error_names)):
        table.add_column(name, justify="right")
    for row in result.rows:
        cells = [_number(seconds and seconds * scale, ".4g") for seconds in (getattr(row, name) for name in phases)]
        cells += [_number(row.ratios.get(name), ".3g") for name in ratio_names]
        cells += [_number(row.peak_bytes if row.peak_bytes is None else row.peak_bytes / 2**20, ".1f")]
        cells += [_number(row.counts.get(name), "d") for name in count_names]
        cells += [_number(row.errors.get(name), ".1e") for name in error_names]
        label = row.provider + ("" if row.entropy else " (no entropy)") + (f": {row.failure}" if row.failure else "")
        table.add_row(label, *cells)
    console = Console()
    if console.width < MIN_WIDTH or not console.is_terminal:  # rather broken lines than cut numbers
        console = Console(width=MIN_WIDTH)
    console.print(table)


MIN_WIDTH = 150
SIZES = (("T", "num_tokens"), ("H", "hidden_size"), ("V", "vocab_size"))


def _keys(rows: Sequence[Row], attribute: str) -> list[str]:
    """Return the keys of all rows' dictionaries, in order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in getattr(row, attribute)))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
