"""The effect of K and the nodes' split on the 32B recipe, only simulated (no GPU was measured).

Nodes, servers, their requests (`max_concurrency`), the layout of a trainer and the sizes of groups
and mini-batches are those of configs/dapo_32b_async.yaml. Speeds and lengths are assumed as by
`python -m megatron_dapo plan` for this config on H100, so that both say the same of it. The plan
simulates a part of the servers for a few steps. Here are all of them, until the ages of tokens have
settled.

python -m benchmarks.simulate_async_recipe [--quick] [--json FILE]
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.report import plain_table, written
from megatron_dapo.commands.plan.simulation import Simulation, mean_age, random_draws
from megatron_dapo.commands.plan.step_time import Assumptions, machines_of, phase_times, step_recipe
from megatron_dapo.config.key_names import ROLLOUT as ROLLOUT_KEY
from megatron_dapo.config.keys import with_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.estimates.recompute import settled
from megatron_dapo.huggingface.spec_reader import model_spec

SERVER = f"{ROLLOUT_KEY}.server"
CONFIG = load_config(recipe("dapo_32b_async"), [])
ROLLOUT = CONFIG.actor_rollout_ref.rollout
NUM_GPUS = (CONFIG.trainer.nnodes + ROLLOUT.server.nnodes) * CONFIG.trainer.n_procs_per_node
SERVER_GPUS = ROLLOUT.server.tensor_model_parallel_size
MINI_BATCH = CONFIG.actor_rollout_ref.actor.ppo_mini_batch_size  # groups per optimizer step

SPEC = model_spec(model_json_named("qwen2.5-32b"))
USUAL = Assumptions.usual(CONFIG, HARDWARE["h100"])
LENGTHS = USUAL.responses
SEED = 1
# The first versions are warm-up, until their age is out of the figures. That takes four times the
# largest age of a token, and at least the optimizer steps of 48 small steps. The two halves of the
# measured steps then have about one age.
WARM_UP, MEASURED = 192, 192  # optimizer steps
SLOW_WARM_UP = 384  # of servers a little faster than the trainer: they fill a large bound late


@dataclass(frozen=True)
class Case:
    """One line of the table: num_steps measured ones after warm_up others."""

    acceptance: float
    train_batch_size: int
    max_staleness: int
    trainer_gpus: int
    num_steps: int
    warm_up: int

    @property
    def config(self) -> Config:
        """Return the recipe with this split and these steps."""
        nodes = self.trainer_gpus // CONFIG.trainer.n_procs_per_node
        per_step = CONFIG.data.gen_batch_size / CONFIG.data.train_batch_size
        split = {
            "trainer.nnodes": nodes,
            f"{SERVER}.nnodes": CONFIG.trainer.nnodes + ROLLOUT.server.nnodes - nodes,
            f"{SERVER}.num_servers": (NUM_GPUS - self.trainer_gpus) // SERVER_GPUS,
            "data.train_batch_size": self.train_batch_size,
            "data.gen_batch_size": round(self.train_batch_size * per_step),
            f"{ROLLOUT_KEY}.max_staleness": self.max_staleness,
        }
        return settled(with_keys(CONFIG, split), SPEC)

    def simulated(self) -> dict:
        """Return the case with its speed; seconds are per 512 groups, so that all lines compare."""
        size = self.train_batch_size
        parts = phase_times(self.config, SPEC, replace(USUAL, acceptance=self.acceptance))
        steps = replace(step_recipe(self.config, self.max_staleness), num_steps=self.num_steps, warm_up=self.warm_up)
        push = parts.push + (parts.prefill_s if self.max_staleness else 0.0)
        machines = machines_of(parts, steps, push)
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
            "train_s": parts.train_s,
            "mfu": parts.training.mfu,
            "server_tokens_per_s": parts.server.tokens_per_s,
            "seconds_per_512_groups": 512 / size / speed.steps_per_s,
            # in optimizer steps; the same of the first half of the measured steps, and of the
            # second
            "mean_age": _mean(ages),
            "mean_age_of_halves": [_mean(ages[:half]), _mean(ages[half:])],
        }


def cases(is_quick: bool) -> list[Case]:
    """Return the lines of the table.

    They are the synchronous recipe, only K, the split, small steps; other acceptances.
    """
    if is_quick:
        return [Case(0.45, 16, K, 64, num_steps=2, warm_up=1) for K in (0, 2)]

    def case(acceptance: float, size: int, max_staleness: int, trainer_gpus: int, warm_up: int = WARM_UP) -> Case:
        num_steps = MEASURED * MINI_BATCH // size
        return Case(acceptance, size, max_staleness, trainer_gpus, num_steps, warm_up * MINI_BATCH // size)

    lines = [case(0.45, 512, K, 64) for K in (0, 1, 2)]
    lines += [case(0.45, 512, 1, 32), case(0.45, 512, 2, 32, SLOW_WARM_UP)]
    lines += [case(0.45, 128, 4, 32), case(0.45, 128, 8, 32, SLOW_WARM_UP)]
    for acceptance in (0.3, 0.6):
        lines += [case(acceptance, 512, 0, 64), case(acceptance, 128, 4, 32)]
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
