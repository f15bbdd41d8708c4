"""What K and the split of the nodes would do to the 32B recipe on its GPUs, by simulation alone (no GPU was measured).

Nodes, servers, the requests that each takes (`max_concurrency`) and the sizes of groups and mini-batches are those of
configs/dapo_32b_async.yaml. Assumed are speeds: a token of each of r requests on a server of 4 GPUs takes 9.85 + 0.15 r
ms, which is 1100 tokens/s per GPU at 128 requests. Training on a step of 512 groups takes 64 GPUs 512 s (38 % MFU in
the update, 45 % for log-probs), half of them twice as long. Lengths are log-normal, 6100 tokens on average. A push
takes 8 s.

python -m benchmarks.simulate_async_recipe [--quick] [--json FILE]
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.report import plain_table, written
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.forecast.simulation import Machines, Recipe, Simulation, mean_age, random_draws
from megatron_dapo.planner.lengths import Lengths

CONFIG = load_config(recipe("dapo_32b_async"), [])
ROLLOUT = CONFIG.actor_rollout_ref.rollout
NUM_GPUS = (CONFIG.trainer.nnodes + ROLLOUT.server.nnodes) * CONFIG.trainer.n_procs_per_node
SERVER_GPUS = ROLLOUT.server.tensor_model_parallel_size
MINI_BATCH = CONFIG.actor_rollout_ref.actor.ppo_mini_batch_size  # groups per optimizer step

TOKEN_S, TOKEN_S_PER_REQUEST = 0.00985, 0.00015
TRAIN_GPU_S = 512.0 * 64 / 512  # GPU seconds per group
PUSH_S = 8.0
LENGTHS = Lengths(median=4400, sigma=0.9, longest=CONFIG.data.max_response_length)
SEED = 1
# Of the first versions, whose age does not show in the figures any more: four times as many as a token may be old, and
# at least as many optimizer steps as 48 small steps take. The two halves of what is measured then have about one age.
WARM_UP, MEASURED = 192, 192  # optimizer steps


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
        size = self.train_batch_size
        train_s = TRAIN_GPU_S * size / self.trainer_gpus
        machines = Machines(num_servers, ROLLOUT.max_concurrency, TOKEN_S, train_s, PUSH_S, TOKEN_S_PER_REQUEST)
        gen_batch_size = size * CONFIG.data.gen_batch_size // CONFIG.data.train_batch_size
        steps = Recipe(size, gen_batch_size, ROLLOUT.n, self.max_staleness, self.num_steps, self.warm_up)
        simulation = Simulation(machines, steps, random_draws(LENGTHS, self.acceptance, ROLLOUT.n, SEED))
        speed = simulation.run()
        ages = [
            mean_age(simulation.trained[step * size : (step + 1) * size], weight_version=step) * size / MINI_BATCH
            for step in range(self.warm_up, self.warm_up + self.num_steps)
        ]
        half = len(ages) // 2
        return {
            **asdict(self),
            **asdict(speed),
            "seconds_per_512_groups": 512 / size / speed.steps_per_s,
            # in optimizer steps; the same of the first half of the measured steps, and of the second
            "mean_age": _mean(ages),
            "mean_age_of_halves": [_mean(ages[:half]), _mean(ages[half:])],
        }


def cases(is_quick: bool) -> list[Case]:
    """The lines of the table: the synchronous recipe, K alone, the split, small steps; other acceptances."""
    if is_quick:
        return [Case(0.45, 16, K, 64, num_steps=2, warm_up=1) for K in (0, 2)]

    def case(acceptance: float, size: int, max_staleness: int, trainer_gpus: int) -> Case:
        num_steps = MEASURED * MINI_BATCH // size
        return Case(acceptance, size, max_staleness, trainer_gpus, num_steps, WARM_UP * MINI_BATCH // size)

    lines = [case(0.45, 512, K, 64) for K in (0, 1, 2)]
    lines += [case(0.45, 512, K, 32) for K in (1, 2)]
    lines += [case(0.45, 128, K, 32) for K in (4, 8)]
    for acceptance, trainer_gpus in ((0.3, 24), (0.6, 40)):
        lines += [case(acceptance, 512, 0, 64), case(acceptance, 128, 8, trainer_gpus)]
    return lines


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


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
    written(
        "async_recipe",
        torch.device("cpu"),
        results,
        arguments.json,
        slots_per_server=ROLLOUT.max_concurrency,
        lengths=asdict(LENGTHS),
    )


if __name__ == "__main__":
    main()
