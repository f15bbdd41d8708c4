"""Slow, silent and lost servers: the real controller beside its simulation.

Eight servers and a trainer that sleep for the time of their work; the controller with its HTTP
client is the program's own. It runs SCALE times as fast as the simulation, with all its intervals.

python -m benchmarks.bench_fleet [--quick] [--json FILE]
"""

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
RECIPE = Recipe(train_batch_size=16, gen_batch_size=64, n=4, max_staleness=4, num_steps=24, warm_up=10)
SCALE = 50  # simulated seconds in one of the real run
BROKEN_AT = 900.0  # simulated seconds: two steps after the warm-up
CASES = {
    "all equal": slow(1.0, 0),
    "one at 1/2": slow(2.0, 3),
    "one at 1/4": slow(4.0, 3),
    "one at 1/10": slow(10.0, 3),
    "one falls silent": slow(float("inf"), 3, at_s=BROKEN_AT),
    "one lost for three steps": (SpeedChange(BROKEN_AT, 3, None), SpeedChange(BROKEN_AT + 225, 3, 1.0)),
    "half of them at 1/2": slow(2.0, *range(4)),
}
QUICK = replace(RECIPE, train_batch_size=4, gen_batch_size=16, max_staleness=2, num_steps=2, warm_up=2)
QUICK_SCALE = 400

# The controller's seconds that are no config keys, as it has them. A server's health is asked for
# in half the time of a look: more often costs processor time.
_INTERVALS = {
    "rollout.build_rollout.LOOK_S": 10.0,
    "rollout.build_rollout.PROBE_INTERVAL_S": 5.0,
    "rollout.sampling._FIRST_PAUSE_S": 0.2,
    "servers.fleet._REST_S": 60.0,
}
_SHORT_LOOKS = {"servers.speedometer._MIN_STEPS": 1}  # a look has no 50 steps of such long ones


@contextmanager
def faster(scale: int) -> Iterator[None]:
    """Let the controller's intervals pass so many times as fast."""
    values = _SHORT_LOOKS | {name: seconds / scale for name, seconds in _INTERVALS.items()}
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(patch(f"megatron_dapo.{name}", value))
        yield


def shortened(machines: Machines, scale: int) -> Machines:
    """Return the servers and the trainer, so many times as fast."""
    return replace(
        machines,
        token_s=machines.token_s / scale,
        token_s_per_request=machines.token_s_per_request / scale,
        train_s=machines.train_s / scale,
        push_s=machines.push_s / scale,
        changes=tuple(replace(change, at_s=change.at_s / scale) for change in machines.changes),
    )


def compared(name: str, recipe: Recipe, scale: int) -> dict:
    """Return a case's figures, measured and simulated, in simulated seconds."""
    machines = replace(MACHINES, changes=CASES[name])
    draws = random_draws(LENGTHS, ACCEPTANCE, recipe.n, SEED)
    simulation = Simulation(machines, recipe, draws)
    simulated = asdict(simulation.run())
    simulated["moves_per_step"] = simulation.fleet.counts["moves"] / len(simulation.step_s)
    with faster(scale):
        measured = measure(shortened(machines, scale), recipe, draws)
    simulated["step_s"] = 1 / simulated.pop("steps_per_s")
    measured["step_s"] = scale / measured.pop("steps_per_s")
    ratio = measured["step_s"] / simulated["step_s"]
    return {"case": name, "measured": measured, "simulated": simulated, "ratio": ratio}


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
    recipe, scale = (QUICK, QUICK_SCALE) if arguments.quick else (RECIPE, SCALE)
    results = []
    for name in ["one at 1/4"] if arguments.quick else CASES:
        print(f"fleet: measuring {name}", file=sys.stderr)
        results.append(compared(name, recipe, scale))
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
        scale=scale,
    )


if __name__ == "__main__":
    main()
