"""The choice of training groups does not depend on their responses' lengths,
though long means late.

A discrete-event simulation (`commands/plan/simulation.py`) drives the program's own queue and
admission. Then comes the controller itself, with servers that sleep in proportion to a response's
length.
"""

import asyncio
from dataclasses import replace

import pytest

from benchmarks.bench_async import bench_config
from benchmarks.sleeping_server import NUM_PROMPTS, Answers, SleepingServer
from megatron_dapo.commands.plan.simulated_server import Machines
from megatron_dapo.commands.plan.simulation import Draw, Recipe, Simulation, mean_length, random_draws
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.data.samples import Group
from megatron_dapo.queue import group_filter
from megatron_dapo.queue.group_filter import by_correctness
from megatron_dapo.queue.group_queue import FilterReason
from megatron_dapo.rollout.controller import Controller
from tests.fake_rollout import rollout_folder, write_files
from tests.proofs import few

pytestmark = pytest.mark.unit

LENGTHS = Lengths(median=60, sigma=0.9, longest=1000)
ACCEPTANCE = 0.45
# servers that could run ahead of the trainer, so that only the bound on the age holds them
MACHINES = Machines(num_servers=4, slots_per_server=16, token_s=0.01, train_s=4.0, push_s=0.1)
N = 4


def drop_late(samples):
    """Return why a group is dropped: no signal, or a push during one of its responses."""
    is_late = any(sample.weight_versions[0] != sample.weight_versions[-1] for sample in samples)
    return by_correctness("strict")(samples) or ("late" if is_late else None)


def trained_over_drawn(max_staleness: int, filter_reason: FilterReason | None = None) -> float:
    """Return the mean length of trained responses over that of all drawn ones,
    of groups with signal."""
    recipe = Recipe(train_batch_size=16, gen_batch_size=64, n=N, max_staleness=max_staleness, num_steps=100)
    simulation = Simulation(MACHINES, recipe, random_draws(LENGTHS, ACCEPTANCE, N, seed=2), filter_reason)
    simulation.run()
    drawn = [length for draw in simulation.drawn if draw.has_signal for length in draw.lengths]
    trained = [len(sample.response_tokens) for group in simulation.trained for sample in group.samples]
    assert len(trained) == 104 * 16 * N
    return mean_length(trained) / mean_length(drawn)


@pytest.mark.parametrize("max_staleness", few([2, 1, 0], 1))
def test_trained_responses_are_as_long_as_drawn_ones(max_staleness):
    assert trained_over_drawn(max_staleness) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("max_staleness", "shorter_by"), few([(2, 0.10), (1, 0.04)], 1))
def test_a_rule_that_drops_late_groups_would_train_on_shorter_ones(max_staleness, shorter_by):
    """By the whole per cents of docs/rollout.md."""
    assert round(1 - trained_over_drawn(max_staleness, drop_late), 2) == shorter_by


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_groups_are_trained_on_in_the_order_of_their_draws_and_none_is_older_than_the_bound(max_staleness):
    recipe = Recipe(train_batch_size=4, gen_batch_size=16, n=2, max_staleness=max_staleness, num_steps=60)
    simulation = Simulation(MACHINES, recipe, random_draws(LENGTHS, ACCEPTANCE, 2, seed=3))
    simulation.run()
    with_signal = [number for number, draw in enumerate(simulation.drawn) if draw.has_signal]
    trained = [group.prompt.index for group in simulation.trained]
    assert trained == with_signal[: len(trained)]
    ages = [
        place // recipe.train_batch_size - min(sample.weight_versions[0] for sample in group.samples)
        for place, group in enumerate(simulation.trained)
    ]  # the step with number s trains on version s - 1
    assert max(ages) == max_staleness


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for prepared in rollout_folder(tmp_path, monkeypatch):
        write_files(prepared, num_prompts=NUM_PROMPTS)
        yield prepared


CONTROLLED = Recipe(train_batch_size=4, gen_batch_size=16, n=2, max_staleness=0, num_steps=20)
CONTROLLED_MACHINES = Machines(num_servers=1, slots_per_server=16, token_s=0.001, train_s=0.05, push_s=0.01)
CONTROLLED_DRAWS = random_draws(Lengths(median=60, sigma=0.9, longest=280), ACCEPTANCE, CONTROLLED.n, seed=4)


def trained_by_controller(folder, recipe: Recipe) -> list[Group]:
    """Return all groups that the controller hands out, each step followed by a push."""

    async def scenario() -> list[Group]:
        machines = CONTROLLED_MACHINES
        server = SleepingServer(Answers(CONTROLLED_DRAWS, recipe.n), machines, count=lambda change: None)
        await server.start()
        controller = Controller(bench_config(folder, [server], machines, recipe))
        groups: list[Group] = []
        try:
            await controller.start()
            for step in range(1, recipe.num_steps + 1):
                groups += (await controller.next_batch(step, weight_version=step - 1)).groups
                await asyncio.sleep(machines.train_s)
                server.pause()
                await asyncio.sleep(machines.push_s)
                server.resume(version=step)
        finally:
            await controller.close()
            await server.stop()
        return groups

    return asyncio.run(scenario())


def controller_trained_over_drawn(groups: list[Group]) -> float:
    """Return the mean length of trained responses over that of all draws with signal
    until the last trained one."""
    last = int(groups[-1].uid.partition("-")[0])
    drawn = [draw for draw in map(CONTROLLED_DRAWS, range(last + 1)) if draw.has_signal]
    trained = [len(sample.response_tokens) for group in groups for sample in group.samples]
    return mean_length(trained) / mean_length([length for draw in drawn for length in draw.lengths])


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_the_controller_trains_on_responses_as_long_as_drawn_ones(folder, max_staleness):
    recipe = replace(CONTROLLED, max_staleness=max_staleness, num_steps=8)  # exact for any number
    groups = trained_by_controller(folder, recipe)
    assert len(groups) == recipe.num_steps * recipe.train_batch_size
    assert controller_trained_over_drawn(groups) == pytest.approx(1.0, abs=0.01)
    # so that the result is not that of a waiting controller:
    # some responses were written by several versions
    assert any(len(set(sample.weight_versions)) > 1 for group in groups for sample in group.samples)


def test_a_controller_that_drops_late_groups_would_train_on_shorter_ones(folder, monkeypatch):
    monkeypatch.setattr(group_filter, "by_correctness", lambda mode: drop_late)
    groups = trained_by_controller(folder, replace(CONTROLLED, max_staleness=2))
    assert controller_trained_over_drawn(groups) < 0.98


def test_the_simulation_takes_the_time_that_is_computed_by_hand():
    """One group of two responses at a time, of 10 and 30 tokens of 0.1 s. They take 3 s of rollout,
    2 s of training, 1 s of push.

    With K = 1 the next group is written while the trainer trains. Only 1 s of its 3 is left, since
    none is written in the push.
    """

    def draw(number: int) -> Draw:
        return Draw((10, 30), has_signal=True)

    machines = Machines(num_servers=1, slots_per_server=2, token_s=0.1, train_s=2.0, push_s=1.0)
    for max_staleness, step_s, wait_s in ((0, 6.0, 3.0), (1, 4.0, 1.0)):
        recipe = Recipe(1, 1, n=2, max_staleness=max_staleness, num_steps=5, warm_up=2)
        speed = Simulation(machines, recipe, draw).run()
        assert speed.steps_per_s == pytest.approx(1 / step_s)
        assert speed.wait_share == pytest.approx(wait_s / step_s)
