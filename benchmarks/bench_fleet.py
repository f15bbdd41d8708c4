"""Slow, silent and lost servers: the real controller beside its simulation.

Eight servers and a trainer sleep for the time of their work; the controller with its HTTP client is
the program's own. The clock of all jumps to the next event (`jumping_clock.py`).

python -m benchmarks.bench_fleet [--quick] [--json FILE]
"""

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console

from benchmarks.bench_async import ACCEPTANCE, LENGTHS, SEED, measure
from benchmarks.report import plain_table, written
from benchmarks.simulate_fleet import slow
from benchmarks.sleeping_server import token_seconds
from megatron_dapo.commands.plan.simulated_server import Machines, SpeedChange
from megatron_dapo.commands.plan.simulation import Recipe, Simulation, random_draws

# Shorter than the 32B recipe, in its proportions: a step takes the servers 75 s, and the longest
# answer three steps.
MACHINES = Machines(8, slots_per_server=16, train_s=70.0, push_s=2.0, **token_seconds(0.8, slots=16))
RECIPE = Recipe(train_batch_size=16, gen_batch_size=64, n=4, max_staleness=8, num_steps=24, warm_up=18)
BROKEN_AT = 1600.0  # soon after the warm-up
PROBE_INTERVAL_S = 5.0  # of a server's health: every second would cost much processor time
CASES = {
    "all equal": slow(1.0, 0),
    "one at 1/2": slow(2.0, 3),
    "one at 1/4": slow(4.0, 3),
    "one at 1/10": slow(10.0, 3),
    "one falls silent": slow(math.inf, 3, at_s=BROKEN_AT),
    "one lost for 5 min": (SpeedChange(BROKEN_AT, 3, None), SpeedChange(BROKEN_AT + 300, 3, 1.0)),
    "half of them at 1/2": slow(2.0, *range(4)),
}
QUICK = replace(RECIPE, train_batch_size=4, gen_batch_size=16, max_staleness=2, num_steps=2, warm_up=2)


def compared(name: str, recipe: Recipe) -> dict:
    """Return a case's figures, measured and simulated."""
    machines = replace(MACHINES, changes=CASES[name])
    draws = random_draws(LENGTHS, ACCEPTANCE, recipe.n, SEED)
    simulation = Simulation(machines, recipe, draws)
    simulated = asdict(simulation.run())
    simulated["moves_per_step"] = simulation.fleet.counts["moves"] / len(simulation.step_s)
    with patch("megatron_dapo.rollout.build_rollout.PROBE_INTERVAL_S", PROBE_INTERVAL_S):
        measured = measure(machines, recipe, draws)
    for figures in (measured, simulated):
        figures["step_s"] = 1 / figures.pop("steps_per_s")
    return {
        "case": name,
        "measured": measured,
        "simulated": simulated,
        "ratio": measured["step_s"] / simulated["step_s"],
    }


def row(result: dict) -> list[str]:
    """Return a case as the page shows it: seconds a step (trainer waits, slots used), moves."""

    def of(figures: dict) -> list[str]:
        shares = f"{figures['wait_share']:.0%}, {figures['slots_used']:.0%}"
        return [f"{figures['step_s']:.1f} ({shares})", f"{figures['moves_per_step']:.1f}"]

    return [result["case"], *of(result["measured"]), *of(result["simulated"]), f"{result['ratio']:.2f}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases and report."""
    description = __doc__.split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_fleet", description=description)
    parser.add_argument("--quick", action="store_true", help="one case, few short steps; seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    recipe = QUICK if arguments.quick else RECIPE
    results = []
    for name in ["one at 1/4"] if arguments.quick else CASES:
        print(f"fleet: measuring {name}", file=sys.stderr)
        results.append(compared(name, recipe))
    columns = ("fleet", "real controller", "moves a step", "simulated", "moves a step", "real / simulated")
    table = plain_table("seconds a step (trainer waits, slots used)", columns)
    for result in results:
        table.add_row(*row(result))
    Console(width=120).print(table)
    written(
        "fleet_cpu",
        torch.device("cpu"),
        results,
        arguments.json,
        machines=asdict(MACHINES),
        recipe=asdict(recipe),
        lengths=asdict(LENGTHS),
        acceptance=ACCEPTANCE,
    )


if __name__ == "__main__":
    main()
