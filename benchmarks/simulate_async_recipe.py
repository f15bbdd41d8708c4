"""What K and the split of the nodes would do to the 32B recipes on 128 GPUs, by simulation alone (no GPU was measured).

A server of 4 GPUs runs 151 requests at most (its KV cache), a token of each takes 10 ms at one request and 32.5 ms at
151: 1160 tokens/s per GPU when full. Training on a step of 512 groups takes 64 GPUs 512 s (38 % MFU in the update, 45 %
for log-probs), half of them twice as long. Lengths are log-normal, 6100 tokens on average. A push takes 8 s.

python -m benchmarks.simulate_async_recipe [--quick] [--json FILE]
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.async_simulation import Lengths, Machines, Recipe, Simulation, random_draws
from benchmarks.report import plain_table, written

NUM_GPUS = 128
SERVER_GPUS = 4
SLOTS = 151
SECONDS_AT_ONE, SECONDS_WHEN_FULL = 0.010, 0.0325  # per token
TRAIN_GPU_S = 512.0 * 64 / 512  # GPU seconds per group
PUSH_S = 8.0
LENGTHS = Lengths(median=4400, sigma=0.9, longest=20480)
N = 16
MINI_BATCH = 32  # groups per optimizer step
SEED = 1


@dataclass(frozen=True)
class Case:
    """One line of the table. num_steps are measured after warm_up ones."""

    acceptance: float
    train_batch_size: int
    max_staleness: int
    trainer_gpus: int
    num_steps: int
    warm_up: int

    def simulated(self) -> dict:
        """Return the case with its speed; seconds are per 512 groups, so that all lines compare."""
        num_servers = (NUM_GPUS - self.trainer_gpus) // SERVER_GPUS
        slope = (SECONDS_WHEN_FULL - SECONDS_AT_ONE) / (SLOTS - 1)
        train_s = TRAIN_GPU_S * self.train_batch_size / self.trainer_gpus
        machines = Machines(num_servers, SLOTS, SECONDS_AT_ONE - slope, train_s, PUSH_S, slope)
        size = self.train_batch_size
        recipe = Recipe(size, 3 * size, N, self.max_staleness, self.num_steps, self.warm_up)
        simulation = Simulation(machines, recipe, random_draws(LENGTHS, self.acceptance, N, SEED))
        speed = simulation.run()
        ages = [
            place // size - sum(sample.weight_versions) / 2  # half of the tokens by the first version, half by the last
            for place, group in enumerate(simulation.trained)
            for sample in group.samples
            if place >= self.warm_up * size
        ]
        return {
            **asdict(self),
            **asdict(speed),
            "seconds_per_512_groups": 512 / size / speed.steps_per_s,
            "mean_age": sum(ages) / len(ages) * size / MINI_BATCH,  # in optimizer steps
        }


def cases(is_quick: bool) -> list[Case]:
    """The lines of the table: the synchronous recipe, K alone, the split, small steps; other acceptances."""
    if is_quick:
        return [Case(0.45, 16, K, 64, num_steps=2, warm_up=1) for K in (0, 2)]
    lines = [Case(0.45, 512, 0, 64, 3, 1), Case(0.45, 512, 1, 64, 4, 2), Case(0.45, 512, 2, 64, 4, 3)]
    lines += [Case(0.45, 512, 1, 32, 4, 2), Case(0.45, 512, 2, 32, 4, 3)]
    lines += [Case(0.45, 128, K, 32, 16, 12) for K in (4, 8)]
    for acceptance, trainer_gpus in ((0.3, 24), (0.6, 40)):
        lines += [Case(acceptance, 512, 0, 64, 3, 1), Case(acceptance, 128, 8, trainer_gpus, 16, 12)]
    return lines


def show(results: Sequence[dict]) -> None:
    """Print the table; the age is in optimizer steps."""
    columns = (
        "acceptance",
        "groups per step",
        "K",
        "GPUs train:sample",
        "s per 512 groups",
        "trainer waits",
        "slots used",
        "age",
    )
    table = plain_table("simulated, Qwen2.5-32B on 128 GPUs", columns)
    for result in results:
        table.add_row(
            f"{result['acceptance']:g}",
            str(result["train_batch_size"]),
            str(result["max_staleness"]),
            f"{result['trainer_gpus']}:{NUM_GPUS - result['trainer_gpus']}",
            f"{result['seconds_per_512_groups']:.0f}",
            f"{result['wait_share']:.0%}",
            f"{result['slots_used']:.0%}",
            f"{result['mean_age']:.0f}",
        )
    Console(width=120).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate all cases and report."""
    description = __doc__.split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate_async_recipe", description=description)
    parser.add_argument("--quick", action="store_true", help="two small cases; seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args(argv)
    results = [case.simulated() for case in cases(arguments.quick)]
    show(results)
    written("async_recipe", torch.device("cpu"), results, arguments.json)


if __name__ == "__main__":
    main()
