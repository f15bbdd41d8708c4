"""The arithmetic demo's learning and seconds per step at each max_staleness.

Three seeds, whole runs.

python -m benchmarks.bench_async_demo [--quick] [--runs FOLDER] [--json FILE]
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console

from benchmarks.report import plain_table, written
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.closing_table import read_metrics

STALENESS, SEEDS = (0, 1, 2, 4), (1, 2, 3)
ALL_STEPS = ["trainer.total_training_steps=40"]
QUICK = (0, 1), (1,), ["trainer.total_training_steps=3"]
NUM_LAST = 5  # steps in the mean of the last reward
# half a gen batch: more would only make answers older
FEWER_SLOTS = "actor_rollout_ref.rollout.max_concurrency=64"
CORRECTION = "algorithm.rollout_correction.rollout_is=token"


def overrides(max_staleness: int, seed: int, folder: Path) -> list[str]:
    ahead = [f"actor_rollout_ref.rollout.max_staleness={max_staleness}", FEWER_SLOTS, CORRECTION]
    return [f"trainer.seed={seed}", f"data.seed={seed}", f"trainer.run_dir={folder}", *(ahead if max_staleness else [])]


def measured(max_staleness: int, seed: int, runs: Path, length: list[str]) -> dict:
    """Run the demo, unless its folder holds a finished run; return the run's figures."""
    folder = runs / f"demo_k{max_staleness}_s{seed}"
    if not RunFolder(folder).model.exists():
        arguments = [*overrides(max_staleness, seed, folder), *length]
        subprocess.run([sys.executable, "-m", "examples.arithmetic.demo", *arguments], check=True, stdout=sys.stderr)
    rows = read_metrics(RunFolder(folder).metrics)
    steps = [row for row in rows if "actor/loss" in row]
    # of responses that the step waited for
    rewards = [row["reward/mean"] for row in steps if "reward/mean" in row]
    return {
        "max_staleness": max_staleness,
        "seed": seed,
        "num_steps": len(steps),
        "first_reward": fmean(rewards[:NUM_LAST]),
        "last_reward": fmean(rewards[-NUM_LAST:]),
        "accuracy": [row["val/accuracy"] for row in rows if "val/accuracy" in row][-1],
        "oldest": max(row["rollout/staleness_max"] for row in steps),
        "seconds_per_step": fmean(row["time/step"] for row in steps),
    }


def table(results: list[dict]):
    """Return a table with one row per seed and max_staleness."""
    names = ("seed", "K", "first reward", "last reward", "beside K = 0", "accuracy", "oldest", "s per step")
    rows = plain_table("the arithmetic demo", names)
    synchronous = {result["seed"]: result["last_reward"] for result in results if not result["max_staleness"]}
    for result in results:
        rewards = (result["first_reward"], result["last_reward"], result["last_reward"] - synchronous[result["seed"]])
        figures = (*(f"{reward:.3f}" for reward in rewards), f"{result['accuracy']:.3f}", f"{result['oldest']:.0f}")
        rows.add_row(str(result["seed"]), str(result["max_staleness"]), *figures, f"{result['seconds_per_step']:.2f}")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three steps, one seed; a minute")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs; those that it has are not repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="async-demo-") as temporary:
        runs = options.runs or Path(temporary)
        staleness, seeds, length = QUICK if options.quick else (STALENESS, SEEDS, ALL_STEPS)
        results = [measured(each, seed, runs, length) for seed in seeds for each in staleness]
    Console(highlight=False, width=120).print(table(results))
    written("async_demo", torch.device("cpu"), results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
