"""Peak memory and time of converting a made-up model, Hugging Face -> Megatron -> Hugging Face.

It runs on one process, beside transformers' own load of the model. Each runs in a process of its
own, with its own memory (RssAnon) read from /proc meanwhile. Pages of mapped files, taken back by
the system at need, are counted only in the last column. `start` is a process with the same imports
and no work; `model` is the size of the weights.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.report import plain_table, written
from benchmarks.synthetic_model import ModelSize, write_model

SIZES = {
    "quick": (ModelSize(hidden=64, ffn=128, layers=2, vocab=256), 100_000),
    "3 GB": (ModelSize(hidden=2048, ffn=8192, layers=20, vocab=65536, heads=16), 1_000_000_000),
}
POLL_S = 0.01
START = "import torch, transformers, megatron_dapo.platform.device as p; p.prepare_megatron(); import megatron.core"
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
sum(weight.sum() for weight in model.parameters())  # until then it maps the files and has read none of them
"""


@dataclass(frozen=True)
class Measured:
    """One process: its own memory at the peak, without and with all mapped files, and its time."""

    name: str
    seconds: float
    peak_anonymous: int
    peak_resident: int


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of 0.4 MB: does it run?")
    parser.add_argument("--folder", type=Path, help="where to work: 10 GB are written (default: the system's place)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    options = parser.parse_args(arguments)
    name = "quick" if options.quick else "3 GB"
    size, shard_bytes = SIZES[name]
    with tempfile.TemporaryDirectory(prefix="convert-", dir=options.folder) as folder:
        source, converted, back = (Path(folder) / part for part in ("hf", "megatron", "back"))
        write_model(source, size, torch.bfloat16, shard_bytes)
        shards = [path.stat().st_size for path in source.glob("*.safetensors")]
        rows = [
            measured("start", [sys.executable, "-c", START]),
            measured("transformers, load", [sys.executable, "-c", LOAD, str(source)]),
            measured(
                "hf_to_megatron", [*_tool("hf_to_megatron"), "--hf-model", str(source), "--output", str(converted)]
            ),
            measured(
                "megatron_to_hf", [*_tool("megatron_to_hf"), "--checkpoint", str(converted), "--output", str(back)]
            ),
        ]
        same = _same_files(source, back)
    model_bytes = size.num_values * 2
    # the promise: twice the largest shard, and the process's own part
    bound = 2 * max(shards) + model_bytes
    start = rows[0].peak_anonymous
    result = {
        "model": name,
        "num_values": size.num_values,
        "model_bytes": model_bytes,
        "largest_shard_bytes": max(shards),
        "bound_bytes": bound,
        "files_equal_after_round_trip": same,
        "rows": [
            {**vars(row), "above_start": row.peak_anonymous - start, "within_bound": row.peak_anonymous - start < bound}
            for row in rows
        ],
    }
    show(result)
    return written("convert", torch.device("cpu"), [result], options.json)


def _tool(name: str) -> list[str]:
    return [sys.executable, "-m", f"checkpoints_tools.{name}"]


def measured(name: str, command: Sequence[str]) -> Measured:
    """Run it to its end with a watch on its memory. Raises CalledProcessError."""
    print(f"measuring {name}", file=sys.stderr)
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parent.parent)
    anonymous = resident = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            break
        fields = dict(line.split(":", 1) for line in status.splitlines())
        if "RssAnon" in fields:  # not of a process that has just ended
            anonymous = max(anonymous, int(fields["RssAnon"].split()[0]) * 1024)
            resident = max(resident, int(fields["VmHWM"].split()[0]) * 1024)
        time.sleep(POLL_S)
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Measured(name, time.perf_counter() - started, anonymous, resident)


def _same_files(a: Path, b: Path) -> bool:
    """Return whether the weights are the same bytes in the same files."""
    names = sorted(path.name for path in a.glob("*.safetensors"))
    return names == sorted(path.name for path in b.glob("*.safetensors")) and all(
        subprocess.run(["cmp", "-s", a / name, b / name]).returncode == 0 for name in names
    )


def show(result: dict) -> None:
    title = (
        f"convert, {result['model']}: model {result['model_bytes'] / 1e9:.3g} GB, largest shard "
        f"{result['largest_shard_bytes'] / 1e9:.3g} GB, bound {result['bound_bytes'] / 1e9:.3g} GB above start\n"
        f"weights after the round trip {'are the same bytes' if result['files_equal_after_round_trip'] else 'DIFFER'}"
    )
    columns = ("", "seconds", "own memory GB", "above start GB", "/ model", "with mapped files GB")
    table = plain_table(title, columns)
    for row in result["rows"]:
        above = row["above_start"]
        table.add_row(
            row["name"],
            f"{row['seconds']:.1f}",
            f"{row['peak_anonymous'] / 1e9:.2f}",
            f"{above / 1e9:.2f}",
            f"{above / result['model_bytes']:.2f}",
            f"{row['peak_resident'] / 1e9:.2f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
