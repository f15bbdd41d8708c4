"""What slow, silent and lost servers cost, only simulated: before the rules for a fleet, and with
them.

The shape of the 32B recipe with 24 servers (docs/rollout.md), by default a quarter of its groups
and of each server's slots: a step takes the same time, within some per cent.

python -m benchmarks.simulate_fleet [--quick] [--scale N] [--json FILE]
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

import torch
from rich.console import Console

from benchmarks.report import plain_table, written
from megatron_dapo.commands.plan.simulated_server import Machines, SpeedChange
from megatron_dapo.commands.plan.simulation import Draws, Recipe, Simulation, random_draws
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.data.samples import Group
from megatron_dapo.queue.group_filter import by_correctness
from megatron_dapo.queue.group_queue import GroupQueue, QueueLimits
from megatron_dapo.servers.fleet import TOKEN_TIME, TokenTime

NUM_SERVERS = 24
SLOTS = 128
TOKEN_S = 0.029  # with all slots in use
TRAIN_S, PUSH_S = 250.0, 5.0
LENGTHS = Lengths.with_mean(6144, 0.9, 20480)
ACCEPTANCE = 0.45
N = 16
SEED = 1
BROKEN_AT = 6000.0  # seconds of the run, after its warm-up
REQUEST_TIMEOUT_S = 3600.0  # of a request, for lack of a rule for silent servers


@dataclass(frozen=True)
class Case:
    """A line of the table: a fleet, and where it differs from the recipe."""

    name: str
    changes: tuple[SpeedChange, ...] = ()
    max_staleness: int = 8
    train_batch_size: int = 128
    lengths: Lengths = field(default=LENGTHS)
    acceptance: float = ACCEPTANCE
    assumed_base: float = 1.0
    """Of the rules' seconds per token without requests, over the real ones."""
    is_whole: bool = False
    """All groups and slots are simulated."""

    def recipe(self, scale: int, num_steps: int) -> Recipe:
        """Return the drawing of prompts, of one part in `scale`."""
        size = self.train_batch_size // scale
        return Recipe(size, 3 * size, N, self.max_staleness, num_steps, warm_up=2 * self.max_staleness + 2)

    def machines(self, scale: int) -> Machines:
        """Return the servers, with one slot in `scale`."""
        unit = TOKEN_S / (TOKEN_TIME.base + SLOTS)
        return Machines(
            NUM_SERVERS,
            SLOTS // scale,
            unit * TOKEN_TIME.base,
            TRAIN_S * self.train_batch_size / 128,
            PUSH_S,
            unit * scale,
            # the equal fleet is looked at, too
            self.changes or (SpeedChange(0.0, 0, 1.0),),
            TokenTime(TOKEN_TIME.base * self.assumed_base, scale),
        )

    def draws(self) -> Draws:
        """Return the answers."""
        return random_draws(self.lengths, self.acceptance, N, SEED)


def slow(factor: float, *servers: int, at_s: float = 0.0, until_s: float = math.inf) -> tuple[SpeedChange, ...]:
    """Return that servers take `factor` times as long for a token, for a while."""
    changes = [SpeedChange(at_s, server, factor) for server in servers]
    return tuple(changes if until_s == math.inf else [*changes, *slow(1.0, *servers, at_s=until_s)])


CASES = (
    Case("all equal"),
    Case("one at 1/2", slow(2.0, 3)),
    Case("one at 1/4", slow(4.0, 3)),
    Case("one at 1/4, simulated in full", slow(4.0, 3), is_whole=True),
    Case("one at 1/4, assumed a : b of 132", slow(4.0, 3), assumed_base=2.0),
    Case("one at 1/10", slow(10.0, 3)),
    Case("one at 1/4 for 75 min", slow(4.0, 3, at_s=BROKEN_AT, until_s=BROKEN_AT + 4500)),
    Case("one answers, writes nothing", slow(math.inf, 3, at_s=BROKEN_AT)),
    Case("half of them at 1/2", slow(2.0, *range(12))),
    Case(
        "one lost for 15 min",
        (SpeedChange(BROKEN_AT, 3, None), SpeedChange(BROKEN_AT + 900, 3, 1.0)),
    ),
    Case("one at 1/4, longer tail", slow(4.0, 3), lengths=Lengths.with_mean(6144, 1.2, 20480)),
    Case("one at 1/4, K = 4", slow(4.0, 3), max_staleness=4),
    Case("one at 1/4, K = 2, 512 groups", slow(4.0, 3), max_staleness=2, train_batch_size=512),
)


class QueueByPlaces(GroupQueue):
    """The queue before verdicts: each open draw takes a place in a step, also one without
    signal."""

    def may_start(self, position: int, weight_version: int) -> bool:
        """Return whether a place is left in the steps that may train on the group."""
        size = self.limits.train_batch_size
        places = (self.num_steps or 0) * size + self.num_ready + position
        return places < (weight_version + 1 + self.limits.max_staleness) * size


class SimulationBefore(Simulation):
    """A fleet whose servers count as equal; a silent one keeps its requests until their timeout."""

    def __init__(self, machines: Machines, recipe: Recipe, draws: Draws) -> None:
        super().__init__(machines, recipe, draws)
        limits = QueueLimits(recipe.train_batch_size, recipe.gen_batch_size, 0, max_staleness=recipe.max_staleness)
        self.queue = QueueByPlaces(limits, by_correctness("strict"))

    def look(self) -> None:
        """Drop the requests of a server that has been silent for so long."""
        for server in self.fleet.servers:
            server.num_silent_looks = server.num_silent_looks + 1 if server.is_silent else 0
            if server.num_silent_looks * 10 >= REQUEST_TIMEOUT_S:
                server.num_silent_looks = 0
                self.fleet.drop(server)


@dataclass(frozen=True)
class Bias:
    """Kept responses beside the drawn ones."""

    length: float
    """Mean tokens kept over those drawn, less 1; 0 without pairs."""
    half_width: float
    """Of its 95 % interval."""
    number: int
    """Pairs compared."""

    @property
    def has_none(self) -> bool:
        """Return whether the interval contains 0."""
        return abs(self.length) <= self.half_width


Pairs = Sequence[tuple[int, int]]  # tokens (drawn, kept)


def bias(pairs: Pairs) -> Bias:
    """Return the bias of these pairs' lengths."""
    if len(pairs) < 2:
        return Bias(0.0, 0.0, len(pairs))
    mean = fmean(drawn for drawn, _ in pairs)
    differences = [kept - drawn for drawn, kept in pairs]
    half_width = 1.96 * stdev(differences) / math.sqrt(len(pairs))
    return Bias(fmean(differences) / mean, half_width / mean, len(pairs))


def continued_lengths(simulation: Simulation, draws: Draws) -> Pairs:
    """Return the lengths of responses that were moved or begun anew, up to the last trained draw.

    All others are as drawn, and would hide a bias.
    """
    last = simulation.trained[-1].prompt.index
    return [
        (draws(request.draw).lengths[request.position], request.length)
        for request in simulation.continued
        if request.draw <= last
    ]


def trained_lengths(trained: Sequence[Group], draws: Draws) -> Pairs:
    """Return the tokens of trained groups, a pair for each."""
    return [
        (sum(draws(group.prompt.index).lengths), sum(len(sample.response_tokens) for sample in group.samples))
        for group in trained
    ]


def acceptance_bias(trained: Sequence[Group], draws: Draws) -> float:
    """Return the share of trained groups up to the last one over that with signal, less 1."""
    num_drawn = trained[-1].prompt.index + 1
    return len(trained) / sum(draws(number).has_signal for number in range(num_drawn)) - 1


def ages(trained: Sequence[Group], size: int) -> list[int]:
    """Return the age of each trained group's oldest token."""
    return [
        place // size - min(int(sample.weight_versions.min()) for sample in group.samples)
        for place, group in enumerate(trained)
    ]


def figures(simulation: Simulation, case: Case, scale: int, num_steps: int) -> dict:
    """Return a run's figures over its measured steps.

    Moves and restarts are of the whole fleet, and of the warm-up, too; the bias is of the responses
    that they concern.
    """
    size = case.train_batch_size // scale
    speed = simulation.run()
    counts = simulation.fleet.counts
    continued = bias(continued_lengths(simulation, case.draws()))
    return {
        "step_s": 1 / speed.steps_per_s,
        "worst_s": max(simulation.step_s[-num_steps:]),
        "wait_share": speed.wait_share,
        "slots_used": speed.slots_used,
        "moves_per_step": counts["moves"] * scale / len(simulation.step_s),
        "num_restarts": counts["restarts"] * scale,
        "blocked_share": counts["blocked looks"] / max(counts["looks"], 1),
        "servers_slow": counts["slow"] / max(counts["looks"], 1),
        "largest_factor": simulation.fleet.largest_factor,
        "oldest": max(ages(simulation.trained, size)),
        "num_continued": continued.number,
        "length_bias": continued.length,
        "length_bias_half_width": continued.half_width,
    }


def compared(case: Case, scale: int, num_steps: int) -> dict:
    """Return a case's figures before the rules and with them."""
    scale = 1 if case.is_whole else scale
    machines, recipe = case.machines(scale), case.recipe(scale, num_steps)
    return {"case": case.name} | {
        name: figures(kind(machines, recipe, case.draws()), case, scale, num_steps)
        for name, kind in (("before", SimulationBefore), ("with_rules", Simulation))
    }


def row(result: dict) -> list[str]:
    """Return a case as the page shows it: seconds a step (trainer waits, slots used), worst step."""

    def of(speed: dict) -> list[str]:
        shares = f"{speed['wait_share']:.0%}, {speed['slots_used']:.0%}"
        return [f"{speed['step_s']:.0f} ({shares})", f"{speed['worst_s']:.0f}"]

    after = result["with_rules"]
    return [result["case"], *of(result["before"]), *of(after), f"{after['moves_per_step']:.0f}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate all cases and report."""
    description = __doc__.split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate_fleet", description=description)
    parser.add_argument("--quick", action="store_true", help="one small case; seconds")
    parser.add_argument("--scale", type=int, default=4, help="simulate one part in so many (default: 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args(argv)
    scale, num_steps = (32, 2) if arguments.quick else (arguments.scale, 60)
    results = [compared(case, scale, num_steps) for case in (CASES[2:3] if arguments.quick else CASES)]
    table = plain_table("simulated", ("fleet", "before", "worst", "with the rules", "worst", "moves a step"))
    for result in results:
        table.add_row(*row(result))
    Console(width=120).print(table)
    written("fleet", torch.device("cpu"), results, arguments.json, scale=scale, num_steps=num_steps)


if __name__ == "__main__":
    main()
