"""The whole controller with eight sleeping servers, one of them slow, silent, or well again."""

import asyncio
import json
import math
import time

import pytest

from benchmarks import bench_fleet
from benchmarks.bench_async import bench_config
from benchmarks.jumping_clock import JumpingClock
from benchmarks.sleeping_server import NUM_PROMPTS, Answers, SleepingServer, token_seconds
from megatron_dapo.commands.plan.simulated_server import Machines
from megatron_dapo.commands.plan.simulation import Recipe, random_draws
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.rollout.controller import Controller
from tests.fake_rollout import rollout_folder, write_files
from tests.helpers import REPOSITORY
from tests.proofs import few

pytestmark = pytest.mark.unit

LOOK_S = 0.1
RECIPE = Recipe(train_batch_size=8, gen_batch_size=32, n=4, max_staleness=4, num_steps=6)
MACHINES = Machines(8, slots_per_server=16, train_s=0.2, push_s=0.02, **token_seconds(0.004, slots=16))
DRAWS = random_draws(Lengths(median=60, sigma=0.9, longest=280), 0.45, RECIPE.n, seed=4)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_dapo.rollout.build_rollout.LOOK_S", LOOK_S)
    monkeypatch.setattr("megatron_dapo.servers.speedometer._MIN_STEPS", 1)  # of so short looks
    for folder in rollout_folder(tmp_path, monkeypatch):
        write_files(folder, num_prompts=NUM_PROMPTS)
        yield folder


async def train(controller, servers, num_steps, slowness):
    """The groups and metrics of the steps, and the number of moves after the first one:
    then server 0 changes its speed, and is well for the last two."""
    groups, moves, factors = [], 0.0, []
    for step in range(1, num_steps + 1):
        batch = await controller.next_batch(step, weight_version=step - 1)
        groups += batch.groups
        moves += batch.metrics["rollout/num_moves"]
        factors.append(batch.metrics["rollout/server_factor_max"])
        if step in (1, num_steps - 2):
            servers[0].set_slowness(slowness if step == 1 else 1.0)
        await asyncio.sleep(MACHINES.train_s)
        for server in servers:
            server.pause()
        await asyncio.sleep(MACHINES.push_s)
        for server in servers:
            server.resume(version=step)
    return groups, moves, factors


def trained(folder, slowness):
    async def scenario():
        answers = Answers(DRAWS, RECIPE.n)
        servers = [SleepingServer(answers, MACHINES, lambda change: None) for _ in range(MACHINES.num_servers)]
        for server in servers:
            await server.start()
        controller = Controller(bench_config(folder, servers, MACHINES, RECIPE))
        try:
            await controller.start()
            with clock.jumping():  # the machine's other work changes no speed
                result = await asyncio.wait_for(train(controller, servers, RECIPE.num_steps, slowness), 300)
            return *result, controller._drawing.queue.account
        finally:
            await controller.close()
            for server in servers:
                await server.stop()

    clock = JumpingClock()
    return clock.run(scenario())


@pytest.mark.parametrize("slowness", few([4.0, math.inf, 10.0], 2))
def test_every_trained_answer_is_whole_though_its_server_was_slow_and_the_draws_keep_their_order(folder, slowness):
    groups, moves, factors, account = trained(folder, slowness)
    assert len(groups) == RECIPE.num_steps * RECIPE.train_batch_size and account.is_closed
    assert account.num_discarded == 0
    numbers = [int(group.uid.partition("-")[0]) for group in groups]
    # the first draws with signal, each once
    assert numbers == [number for number in range(numbers[-1] + 1) if DRAWS(number).has_signal]
    for number, group in zip(numbers, groups, strict=True):
        lengths = [len(sample.response_tokens) for sample in group.samples]
        assert sorted(lengths) == sorted(DRAWS(number).lengths)
        assert all(sample.response_tokens[-1] == 0 and sample.finish_reason == "stop" for sample in group.samples)
    assert moves >= 1  # a silent one hands its requests back
    if math.isfinite(slowness):
        assert max(factors) > 2


def test_an_hour_of_the_jumping_clock_passes_while_nothing_is_to_do_and_in_the_order_of_events():
    clock = JumpingClock()
    seen = []

    async def sleep(seconds, began):
        await asyncio.sleep(seconds)
        seen.append(time.monotonic() - began)

    async def main():
        with clock.jumping():
            began = time.monotonic()
            await asyncio.gather(sleep(3600.0, began), sleep(7.0, began), sleep(60.0, began))

    clock.run(main())
    assert seen == pytest.approx([7.0, 60.0, 3600.0])


def test_the_benchmark_runs_and_its_report_has_what_the_docs_show(tmp_path):
    bench_fleet.main(["--quick", "--json", str(tmp_path / "fleet_cpu.json")])
    (result,) = json.loads((tmp_path / "fleet_cpu.json").read_text())["results"]
    assert 0 < result["ratio"] and 0 < result["measured"]["slots_used"] <= 1
    assert result["simulated"].keys() == result["measured"].keys()


def test_the_real_controller_takes_as_long_as_its_simulation():
    report = json.loads((REPOSITORY / "benchmarks/results/fleet_cpu.json").read_text())
    assert report["machines"]["num_servers"] == 8 and report["recipe"]["num_steps"] >= 20
    assert [result["case"] for result in report["results"]] == list(bench_fleet.CASES)
    page = (REPOSITORY / "docs/rollout.md").read_text().splitlines()
    for result in report["results"]:
        measured, simulated = result["measured"]["step_s"], result["simulated"]["step_s"]
        assert measured == pytest.approx(simulated, rel=0.15), result["case"]
        assert f"| {' | '.join(bench_fleet.row(result))} |" in page
