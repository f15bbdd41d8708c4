"""The hand-over of a rollout step: the bytes held by the controller, and the seconds of each way.

The samples come to rank 0 and from there, as micro-batches, to all ranks of TP2 x DP2 over gloo.
The state of the same number of waiting groups is saved, with its seconds.

python -m benchmarks.bench_hand_over [--quick] [--samples 512,1024] [--tokens 6000] [--json FILE]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.report import plain_table, written

CASE = Path(__file__).with_name("hand_over_case.py")
RECIPE = (8192, 6000)  # samples and tokens of a step of the 32B recipe
# Free memory stays with a process for its next round. Otherwise a virtual machine may give it back
# to its host, and the time to have it again hides the growth of the seconds.
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_ARENA_MAX": "1"}


def measured(num_samples: int, num_tokens: int, rounds: int) -> dict:
    """Return the figures of one size, from processes of its own."""
    command = [sys.executable, str(CASE), *map(str, (num_samples, num_tokens, rounds))]
    environment = {**os.environ, **KEEPS_MEMORY, "PYTHONPATH": str(CASE.parents[1])}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    share = num_samples * num_tokens / (RECIPE[0] * RECIPE[1])
    return {"share_of_recipe": share, **json.loads(ended.stdout.splitlines()[-1])}


def seconds(figures: dict) -> float:
    """Return the seconds from the controller to all ranks."""
    return figures["to_rank_0_s"] + figures["to_ranks_s"]


def show(results: Sequence[dict]) -> None:
    """Print a line per size."""
    columns = (
        *("samples", "share of recipe", "bytes per token", "ms per answer", "to rank 0 s", "to ranks s", "(cut s)"),
        *("(collate s)", "sum s", "CPU s", "state fetched s", "written s", "read s", "GB"),
    )
    table = plain_table(f"hand-over at {results[0]['num_tokens']} tokens, TP2 x DP2", columns)
    for figures in results:
        cells = [f"{figures[name]:.3g}" for name in ("num_samples", "share_of_recipe")]
        cells += [f"{figures[name]:.1f}" for name in ("bytes_per_token", "ms_per_answer")]
        parts = [figures[f"{part}_s"] for part in ("to_rank_0", "to_ranks", "cut", "collate")]
        parts += [seconds(figures), figures["cpu_s"]]
        parts += [figures[f"state_{part}_s"] for part in ("to_rank_0", "written", "read")]
        table.add_row(*cells, *(f"{part:.2f}" for part in parts), f"{figures['state_bytes'] / 1e9:.2f}")
    Console(width=160).print(table)


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 samples of 500 tokens: does it run?")
    parser.add_argument("--samples", default="512,1024", help="numbers of samples, with commas between them")
    parser.add_argument("--tokens", type=int, default=6000, help="of each response")
    parser.add_argument("--rounds", type=int, default=3, help="hand-overs of which the fastest is taken")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    options = parser.parse_args(arguments)
    sizes = [32] if options.quick else [int(number) for number in options.samples.split(",")]
    case = (500, 1) if options.quick else (options.tokens, options.rounds)
    results = [measured(num_samples, *case) for num_samples in sizes]
    show(results)
    return written("hand_over", torch.device("cpu"), results, options.json)


if __name__ == "__main__":
    main()
