"""What a held-out evaluation after every step costs a run: seconds per step at `max_staleness` 1, with it and without.

The controller is the program's own; servers and trainer sleep for as long as their work would take. Once the trainer is
the bottleneck and the servers have slots to spare, and once all slots are in use all the time.

python -m benchmarks.bench_validation [--quick] [--steps N] [--json FILE]
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console

from benchmarks.bench_async import ACCEPTANCE, LENGTHS, SEED, SlotCount, bench_config
from benchmarks.report import plain_table, written
from benchmarks.sleeping_server import NUM_PROMPTS, Answers, SleepingServer
from megatron_dapo.commands.plan.simulation import Machines, Recipe, random_draws
from megatron_dapo.rollout.controller import Controller
from megatron_dapo.storage.run_folder import RunFolder
from tests.fake_rollout import write_files

NUM_HELD_OUT = 8  # prompts, of as many answers each as a group of training has
RECIPE = Recipe(train_batch_size=16, gen_batch_size=64, n=4, max_staleness=1, num_steps=12)
TRAINER_BOUND = "the trainer"
SERVER_BOUND = "the servers"
MACHINES = {
    TRAINER_BOUND: Machines(num_servers=2, slots_per_server=24, token_s=0.005, train_s=2.0, push_s=0.1),
    SERVER_BOUND: Machines(num_servers=2, slots_per_server=8, token_s=0.005, train_s=1.0, push_s=0.1),
}
QUICK_RECIPE = replace(RECIPE, train_batch_size=4, gen_batch_size=16, num_steps=2, warm_up=2)
QUICK_MACHINES = {
    name: replace(machines, token_s=0.001, train_s=machines.train_s / 5, push_s=0.01)
    for name, machines in MACHINES.items()
}
ROUNDS = 2  # with and without, in turns


@dataclass(frozen=True)
class Cost:
    """Means over the steps after the warm-up.

    step_s: seconds. push_waits_s: of these, for the last answer of the evaluation; batch_waits_s: for a batch.
    slots_used: share of the servers' slots. val_tokens, train_tokens: that were sampled.
    """

    step_s: float
    push_waits_s: float
    batch_waits_s: float
    slots_used: float
    val_tokens: float
    train_tokens: float


async def train(
    controller: Controller,
    servers: Sequence[SleepingServer],
    slots: SlotCount,
    machines: Machines,
    recipe: Recipe,
    validates: bool,
) -> Cost:
    """Ask for batches, sleep as a trainer, wait for the evaluation of the last weights, push: as the trainer does."""
    batch_waits_s = push_waits_s = train_tokens = 0.0
    started = (time.monotonic(), slots.slot_seconds())
    for step in range(1, recipe.warm_up + recipe.num_steps + 1):
        if step == recipe.warm_up + 1:
            started = (time.monotonic(), slots.slot_seconds())
            batch_waits_s = push_waits_s = train_tokens = 0.0
        asked_at = time.monotonic()
        batch = await controller.next_batch(step, weight_version=step - 1)
        batch_waits_s += time.monotonic() - asked_at
        assert len(batch.groups) == recipe.train_batch_size
        train_tokens += batch.metrics["rollout/num_tokens"]
        await asyncio.sleep(machines.train_s)
        if validates and step > 1:
            asked_at = time.monotonic()
            metrics = await controller.evaluate(step - 1, weight_version=step - 1)
            push_waits_s += time.monotonic() - asked_at
            assert metrics["val/num_prompts"] == NUM_HELD_OUT
        for server in servers:
            server.pause()
        await asyncio.sleep(machines.push_s)
        for server in servers:
            server.resume(version=step)
        if validates:
            await controller.begin_evaluation(step, weight_version=step)
    seconds = time.monotonic() - started[0]
    return Cost(
        step_s=seconds / recipe.num_steps,
        push_waits_s=push_waits_s / recipe.num_steps,
        batch_waits_s=batch_waits_s / recipe.num_steps,
        slots_used=(slots.slot_seconds() - started[1]) / (seconds * machines.num_slots),
        val_tokens=0.0,
        train_tokens=train_tokens / recipe.num_steps,
    )


async def measured(folder: Path, machines: Machines, recipe: Recipe, validates: bool) -> Cost:
    """Return the cost of steps of the real controller with servers and a trainer that sleep."""
    slots = SlotCount()
    answers = Answers(random_draws(LENGTHS, ACCEPTANCE, recipe.n, SEED), recipe.n)
    servers = [SleepingServer(answers, machines.token_s, slots.add) for _ in range(machines.num_servers)]
    for server in servers:
        await server.start()
    rollout = "actor_rollout_ref.rollout"
    held_out = (
        f"data.val_files=[{folder}/val.jsonl]",
        f"{rollout}.val_n={recipe.n}",
        f"{rollout}.val_temperature=1.0",
    )
    config = bench_config(folder, servers, machines, recipe, *held_out)
    controller = Controller(config)
    try:
        await controller.start()
        cost = await train(controller, servers, slots, machines, recipe, validates)
    finally:
        await controller.close()
        for server in servers:
            await server.stop()
    return replace(cost, val_tokens=kept_tokens(RunFolder.of(config.trainer), recipe) if validates else 0.0)


def kept_tokens(run: RunFolder, recipe: Recipe) -> float:
    """Return the mean number of tokens of the evaluations that were waited for, after checking that every answer is
    kept, and that no other weights wrote a token of it."""
    num_tokens = []
    for step in range(recipe.warm_up, recipe.warm_up + recipe.num_steps):
        records = [json.loads(line) for line in run.validation(step).read_text(encoding="utf-8").splitlines()]
        assert len(records) == NUM_HELD_OUT * recipe.n
        assert {version for record in records for version in record["weight_versions"]} == {step}
        num_tokens.append(sum(record["num_tokens"] for record in records))
    return fmean(num_tokens)


def once(machines: Machines, recipe: Recipe, validates: bool) -> Cost:
    """Return the cost of one run, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="validation-") as name:
        folder = Path(name)
        write_files(folder, num_prompts=NUM_PROMPTS)
        rows = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "train.jsonl").write_text("".join(rows[:-NUM_HELD_OUT]), encoding="utf-8")
        (folder / "val.jsonl").write_text("".join(rows[-NUM_HELD_OUT:]), encoding="utf-8")
        sys.path.insert(0, name)
        try:
            return asyncio.run(measured(folder, machines, recipe, validates))
        finally:
            sys.path.remove(name)
            sys.modules.pop("fake_rewards", None)


def mean_cost(costs: Sequence[Cost]) -> Cost:
    """Return the means of the costs."""
    return Cost(**{name: fmean(asdict(cost)[name] for cost in costs) for name in asdict(costs[0])})


def compared(bottleneck: str, machines: Machines, recipe: Recipe, rounds: int) -> dict:
    """Return the costs with and without evaluations. more: by what share a step takes longer with them; more_tokens:
    their tokens over those of training."""
    costs: dict[bool, list[Cost]] = {False: [], True: []}
    for _ in range(rounds):
        for validates in costs:
            print(f"validation: {bottleneck}, evaluations: {validates}", file=sys.stderr)
            costs[validates].append(once(machines, recipe, validates))
    alone, together = mean_cost(costs[False]), mean_cost(costs[True])
    return {
        "bottleneck": bottleneck,
        "without": asdict(alone),
        "with": asdict(together),
        "more": together.step_s / alone.step_s - 1,
        "more_tokens": together.val_tokens / together.train_tokens,
    }


def show(results: Sequence[dict]) -> None:
    """Print a line for each bottleneck."""
    columns = ("bottleneck", "step s without", "step s with", "more time", "more tokens", "push waits s", "slots used")
    table = plain_table("an evaluation with kept answers after every step, K = 1", columns)
    for result in results:
        alone, together = result["without"], result["with"]
        table.add_row(
            result["bottleneck"],
            f"{alone['step_s']:.3f}",
            f"{together['step_s']:.3f}",
            f"{result['more']:+.1%}",
            f"{result['more_tokens']:+.0%}",
            f"{together['push_waits_s']:.3f}",
            f"{alone['slots_used']:.0%} -> {together['slots_used']:.0%}",
        )
    Console(width=120).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_validation", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few short steps; seconds")
    parser.add_argument("--steps", type=int, metavar="N", help=f"measured steps (default: {RECIPE.num_steps})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    machines, recipe = (QUICK_MACHINES, QUICK_RECIPE) if arguments.quick else (MACHINES, RECIPE)
    recipe = replace(recipe, num_steps=arguments.steps or recipe.num_steps)
    rounds = 1 if arguments.quick else ROUNDS
    results = [compared(bottleneck, machines[bottleneck], recipe, rounds) for bottleneck in machines]
    show(results)
    written(
        "validation",
        torch.device("cpu"),
        results,
        arguments.json,
        machines={name: asdict(one) for name, one in machines.items()},
        recipe=asdict(recipe),
        lengths=asdict(LENGTHS),
        acceptance=ACCEPTANCE,
        held_out={"num_prompts": NUM_HELD_OUT, "num_answers": recipe.n},
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
