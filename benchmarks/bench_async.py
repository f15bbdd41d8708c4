"""Sampling while the trainer trains: its gain in steps/s at `max_staleness` K = 0, 1, 2.

All in one layout. The controller is the program's own; servers and trainer sleep for the time of
their work, by a clock that jumps to the next event (`jumping_clock.py`). Beside each figure stands
the prediction of a simulation of the same numbers (`megatron_dapo/commands/plan/simulation.py`).

python -m benchmarks.bench_async [--quick] [--staleness 0,1,2] [--steps N] [--json FILE]
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.jumping_clock import JumpingClock
from benchmarks.report import plain_table, written
from benchmarks.sleeping_server import NUM_PROMPTS, Answers, SleepingServer, token_seconds
from megatron_dapo.commands.plan.simulated_server import Machines, SpeedChange
from megatron_dapo.commands.plan.simulation import Draws, Recipe, Simulation, Speed, random_draws
from megatron_dapo.common.rollout_errors import NeedsSync
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.data.samples import RolloutBatch
from megatron_dapo.rollout.controller import Controller
from tests.fake_rollout import make_config, write_files

# in the shape of the 32B recipe's, a 73rd as long
LENGTHS = Lengths(median=60, sigma=0.9, longest=280)
ACCEPTANCE = 0.45
SEED = 1
# of a token on a full server: 8 ms
MACHINES = Machines(num_servers=2, slots_per_server=16, train_s=2.0, push_s=0.1, **token_seconds(0.008, slots=16))
RECIPE = Recipe(train_batch_size=16, gen_batch_size=64, n=4, max_staleness=0, num_steps=12)
QUICK_MACHINES = replace(MACHINES, train_s=0.2, push_s=0.01, **token_seconds(0.001, slots=16))
QUICK_RECIPE = replace(RECIPE, train_batch_size=4, gen_batch_size=16, num_steps=2, warm_up=1)
MANY_STEPS = 10_000  # of the run: no measured one is near its end


class SlotCount:
    """The number of occupied slots of all servers, as a mean over time."""

    def __init__(self) -> None:
        self._number = 0
        self._seconds = 0.0
        self._since = time.monotonic()

    def add(self, change: int) -> None:
        """Note that a request began (+1) or ended (-1)."""
        self._account()
        self._number += change

    def slot_seconds(self) -> float:
        """Return the occupied slots times seconds, so far."""
        self._account()
        return self._seconds

    def _account(self) -> None:
        now = time.monotonic()
        self._seconds += self._number * (now - self._since)
        self._since = now


def bench_config(
    folder: Path, servers: Sequence[SleepingServer], machines: Machines, recipe: Recipe, *overrides: str
) -> Config:
    """Return the config of a controller with these servers; its files are from `write_files`."""
    rollout = "actor_rollout_ref.rollout"
    return make_config(
        folder,
        servers,
        f"data.train_batch_size={recipe.train_batch_size}",
        f"data.gen_batch_size={recipe.gen_batch_size}",
        f"data.max_response_length={LENGTHS.longest}",
        f"{rollout}.n={recipe.n}",
        f"{rollout}.max_concurrency={machines.slots_per_server}",
        f"{rollout}.max_staleness={recipe.max_staleness}",
        f"{rollout}.step_timeout_s=600",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.dynamic_sampling.max_num_gen_batches=1000",
        f"trainer.total_training_steps={MANY_STEPS}",
        *overrides,
    )


async def train(
    controller: Controller, servers: Sequence[SleepingServer], slots: SlotCount, machines: Machines, recipe: Recipe
) -> tuple[Speed, float]:
    """Ask for batches, sleep as a trainer, push.

    Returns the speed of the steps after the warm-up, and the moves per step.
    """
    waited_s = num_moves = 0.0
    discarded = generated = 0.0
    started = (time.monotonic(), slots.slot_seconds())
    for step in range(1, recipe.warm_up + recipe.num_steps + 1):
        if step == recipe.warm_up + 1:
            started = (time.monotonic(), slots.slot_seconds())
            waited_s = discarded = generated = 0.0
        asked_at = time.monotonic()
        batch = await next_batch(controller, servers, step, machines.push_s)
        assert len(batch.groups) == recipe.train_batch_size
        assert batch.metrics["rollout/staleness_max"] <= recipe.max_staleness
        waited_s += time.monotonic() - asked_at
        num_moves += batch.metrics["rollout/num_moves"]
        discarded += batch.metrics["rollout/num_groups_discarded"]
        generated += batch.metrics["dapo/num_kept_groups"] + batch.metrics["dapo/num_filtered_groups"]
        await asyncio.sleep(machines.train_s)
        await push(servers, machines.push_s, version=step)
    seconds = time.monotonic() - started[0]
    speed = Speed(
        steps_per_s=recipe.num_steps / seconds,
        wait_share=waited_s / seconds,
        slots_used=(slots.slot_seconds() - started[1]) / (seconds * machines.num_slots),
        discarded_share=discarded / generated,
    )
    return speed, num_moves / (recipe.warm_up + recipe.num_steps)


async def next_batch(
    controller: Controller, servers: Sequence[SleepingServer], step: int, push_s: float
) -> RolloutBatch:
    """Return the step's batch; push to servers that came back without the weights."""
    while True:
        try:
            return await controller.next_batch(step, weight_version=step - 1)
        except NeedsSync:
            await push(servers, push_s, version=step - 1)


async def push(servers: Sequence[SleepingServer], push_s: float, version: int) -> None:
    """Take the time of a push to the servers that are there."""
    reached = [server for server in servers if server.is_started]
    for server in reached:
        server.pause()
    await asyncio.sleep(push_s)
    for server in reached:
        server.resume(version)


async def change_speeds(servers: Sequence[SleepingServer], changes: Sequence[SpeedChange]) -> None:
    """Slow servers down, lose them and start them again, as a simulation would."""
    began = time.monotonic()
    for change in changes:
        server = servers[change.server]
        await asyncio.sleep(began + change.at_s - time.monotonic())
        if change.factor is None:
            await server.stop()
            continue
        server.set_slowness(change.factor)
        if not server.is_started:
            await server.start()


async def measured(
    folder: Path, machines: Machines, recipe: Recipe, draws: Draws, clock: JumpingClock
) -> tuple[Speed, float]:
    """Return the speed of the real controller with sleeping servers and a sleeping trainer, and the
    moves per step."""
    slots = SlotCount()
    answers = Answers(draws, recipe.n)
    servers = [SleepingServer(answers, machines, slots.add) for _ in range(machines.num_servers)]
    for server in servers:
        await server.start()
    controller = Controller(bench_config(folder, servers, machines, recipe))
    changing: asyncio.Task | None = None
    try:
        await controller.start()
        with clock.jumping():
            changing = asyncio.create_task(change_speeds(servers, machines.changes))
            return await train(controller, servers, slots, machines, recipe)
    finally:
        if changing:
            changing.cancel()
        await controller.close()
        for server in servers:
            await server.stop()


def measure(machines: Machines, recipe: Recipe, draws: Draws) -> dict[str, float]:
    """Return a real run's figures."""
    with tempfile.TemporaryDirectory(prefix="async-") as name:
        folder = Path(name)
        write_files(folder, num_prompts=NUM_PROMPTS)
        sys.path.insert(0, name)
        clock = JumpingClock()
        try:
            speed, moves_per_step = clock.run(measured(folder, machines, recipe, draws, clock))
        finally:
            sys.path.remove(name)
            sys.modules.pop("fake_rewards", None)
    return {**asdict(speed), "moves_per_step": moves_per_step}


def compared(machines: Machines, recipe: Recipe) -> dict:
    """Return one K's measured and predicted speed."""
    draws = random_draws(LENGTHS, ACCEPTANCE, recipe.n, SEED)
    return {
        "max_staleness": recipe.max_staleness,
        "predicted": asdict(Simulation(machines, recipe, draws).run()),
        "measured": measure(machines, recipe, draws),
    }


def discarded_shares(sizes: Sequence[int], num_steps: int) -> list[dict]:
    """Return the share of generated groups discarded at K = 0, by the simulation.

    It is simulated for steps of these sizes, at several acceptances.
    """
    shares = []
    machines = Machines(num_servers=1, slots_per_server=4 * max(sizes), token_s=1.0, train_s=1.0, push_s=0.0)
    for size in sizes:
        for acceptance in (0.3, 0.45, 0.6, 0.8):
            recipe = Recipe(size, 4 * size, n=2, max_staleness=0, num_steps=num_steps, warm_up=2)
            draws = random_draws(Lengths(median=1, sigma=0.0, longest=1), acceptance, recipe.n, SEED)
            share = Simulation(machines, recipe, draws).run().discarded_share
            shares.append({"train_batch_size": size, "acceptance": acceptance, "discarded_share": share})
    return shares


def with_ratios(results: list[dict]) -> list[dict]:
    """Return the results with ratios of steps per second to the first, measured and predicted."""
    for result in results:
        for kind in ("measured", "predicted"):
            first = results[0][kind]["steps_per_s"]
            result[kind]["ratio"] = result[kind]["steps_per_s"] / first
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_async", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few short steps; seconds")
    parser.add_argument("--staleness", default="0,1,2", metavar="K,...", help="values of max_staleness")
    parser.add_argument("--steps", type=int, metavar="N", help=f"measured steps (default: {RECIPE.num_steps})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    machines, recipe = (QUICK_MACHINES, QUICK_RECIPE) if arguments.quick else (MACHINES, RECIPE)
    recipe = replace(recipe, num_steps=arguments.steps or recipe.num_steps)
    results = []
    for max_staleness in map(int, arguments.staleness.split(",")):
        print(f"async: measuring K = {max_staleness}", file=sys.stderr)
        results.append(compared(machines, replace(recipe, max_staleness=max_staleness)))
    show(with_ratios(results))
    shares = discarded_shares((16, 64) if arguments.quick else (16, 128, 512), num_steps=5 if arguments.quick else 30)
    show_discarded(shares)
    written(
        "async",
        torch.device("cpu"),
        results,
        arguments.json,
        machines=asdict(machines),
        recipe=asdict(recipe),
        lengths=asdict(LENGTHS),
        acceptance=ACCEPTANCE,
        discarded=shares,
    )


def show(results: Sequence[dict]) -> None:
    """Print measured figures, each with the predicted one in brackets."""
    columns = ("K", "steps/s", "over the first", "trainer waits", "slots used", "discarded")
    table = plain_table("measured (predicted)", columns)
    for result in results:
        speed, predicted = result["measured"], result["predicted"]
        table.add_row(
            str(result["max_staleness"]),
            f"{speed['steps_per_s']:.3f} ({predicted['steps_per_s']:.3f})",
            f"{speed['ratio']:.2f} ({predicted['ratio']:.2f})",
            *(f"{speed[name]:.0%} ({predicted[name]:.0%})" for name in ("wait_share", "slots_used", "discarded_share")),
        )
    Console(width=110).print(table)


def show_discarded(shares: Sequence[dict]) -> None:
    """Print the shares discarded at K = 0: a line for each size of a step."""
    acceptances = list(dict.fromkeys(share["acceptance"] for share in shares))
    columns = ("groups per step", *(f"acceptance {acceptance:g}" for acceptance in acceptances))
    table = plain_table("discarded at K = 0, of all generated groups (simulated)", columns)
    for size in dict.fromkeys(share["train_batch_size"] for share in shares):
        of_size = [share["discarded_share"] for share in shares if share["train_batch_size"] == size]
        table.add_row(str(size), *(f"{share:.1%}" for share in of_size))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
