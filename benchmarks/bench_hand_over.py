"""The hand-over of a rollout step: the bytes that the controller holds, and the seconds in which its samples come to
rank 0 and from there, as micro-batches, to all ranks of TP2 x DP2 over gloo; the seconds in which the state of as many
waiting groups is saved.

--beside FOLDER measures another checkout of the program in turns with this one, such as one of an earlier commit.

python -m benchmarks.bench_hand_over [--quick] [--samples 512,1024] [--tokens 6000] [--beside FOLDER] [--json FILE]
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
ROOT = CASE.parents[1]
RECIPE = (8192, 6000)  # samples and tokens of a step of the 32B recipe
# Free memory stays with a process for its next round: a virtual machine may give it back to its host, and what it then
# takes to have it again hides how the seconds grow.
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_ARENA_MAX": "1"}
BEFORE = "before"
NOW = "now"


def measured(checkout: Path, num_samples: int, num_tokens: int, rounds: int) -> dict:
    """Return the figures of the program in this folder, from processes of its own."""
    command = [sys.executable, str(CASE), *map(str, (num_samples, num_tokens, rounds))]
    environment = {**os.environ, **KEEPS_MEMORY, "PYTHONPATH": str(checkout)}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def compared(now: dict, before: dict | None) -> dict:
    """Return the figures of one size. ratio: how many times as long the whole hand-over took before; cpu_ratio: in CPU
    seconds of all processes, which say more where others are at work."""
    result = {
        "num_samples": now["num_samples"],
        "num_tokens": now["num_tokens"],
        "share_of_recipe": now["num_samples"] * now["num_tokens"] / (RECIPE[0] * RECIPE[1]),
        "rounds": now["rounds"],
        NOW: now,
    }
    if before is not None:
        result |= {BEFORE: before, "ratio": seconds(before) / seconds(now)}
        result["cpu_ratio"] = before["cpu_s"] / now["cpu_s"]
    return result


def seconds(figures: dict) -> float:
    """Return the seconds from the controller to all ranks."""
    return figures["to_rank_0_s"] + figures["to_ranks_s"]


def show(results: Sequence[dict]) -> None:
    """Print a line per size and checkout."""
    columns = (
        *("samples", "share of recipe", "program", "bytes per token", "ms per answer", "to rank 0 s", "to ranks s"),
        *("(cut s)", "(collate s)", "sum s", "CPU s", "state fetched s", "written s", "read s", "GB"),
    )
    table = plain_table(f"hand-over at {results[0]['num_tokens']} tokens, TP2 x DP2", columns)
    for result in results:
        for name in (BEFORE, NOW):
            if name not in result:
                continue
            figures = result[name]
            cells = [f"{result['num_samples']}", f"{result['share_of_recipe']:.3g}", name]
            cells += [f"{figures['bytes_per_token']:.1f}", f"{figures['ms_per_answer']:.1f}"]
            parts = [figures[f"{part}_s"] for part in ("to_rank_0", "to_ranks", "cut", "collate")]
            parts += [
                seconds(figures),
                figures["cpu_s"],
                *(figures[f"state_{part}_s"] for part in ("to_rank_0", "written", "read")),
            ]
            table.add_row(*cells, *(f"{part:.2f}" for part in parts), f"{figures['state_bytes'] / 1e9:.2f}")
    Console(width=160).print(table)
    for result in results:
        if "ratio" in result:
            print(f"{result['num_samples']} samples: {result['ratio']:.1f} times as long before, ", end="")
            print(f"{result['cpu_ratio']:.1f} times the CPU seconds")


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 samples of 500 tokens: does it run?")
    parser.add_argument("--samples", default="512,1024", help="numbers of samples, with commas between them")
    parser.add_argument("--tokens", type=int, default=6000, help="of each response")
    parser.add_argument("--rounds", type=int, default=3, help="hand-overs of which the fastest is taken")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout, measured too")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    options = parser.parse_args(arguments)
    sizes = [32] if options.quick else [int(number) for number in options.samples.split(",")]
    case = (500, 1) if options.quick else (options.tokens, options.rounds)
    results = []
    for num_samples in sizes:
        before = measured(options.beside.resolve(), num_samples, *case) if options.beside else None
        results.append(compared(measured(ROOT, num_samples, *case), before))
    show(results)
    return written("hand_over", torch.device("cpu"), results, options.json)


if __name__ == "__main__":
    main()
