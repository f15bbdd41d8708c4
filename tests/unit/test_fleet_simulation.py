"""A fleet with slow, silent and lost servers, simulated: fast, and without a bias of lengths.

`make test` simulates an eighth of 24 servers for 10 or 20 steps, `make proofs` a quarter for 200.
"""

import json
import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks import simulate_fleet
from benchmarks.simulate_fleet import (
    CASES,
    LENGTHS,
    TOKEN_S,
    Case,
    acceptance_bias,
    ages,
    bias,
    continued_lengths,
    trained_lengths,
)
from megatron_dapo.commands.plan.simulated_server import Machines, SimulatedRequest, SimulatedServer, SpeedChange
from megatron_dapo.commands.plan.simulation import Draw, Draws, Recipe, Simulation, random_draws
from megatron_dapo.servers.fleet import restart_bias_bound
from tests.helpers import REPOSITORY
from tests.proofs import amount

pytestmark = pytest.mark.unit

SCALE = amount(8, 4)
NUM_STEPS = amount(10, 200)
OF_NAME = {case.name: case for case in CASES}


def simulated(case: Case, draws: Draws | None = None, num_steps: int = NUM_STEPS) -> Simulation:
    """The run of a case, to its end."""
    simulation = Simulation(case.machines(SCALE), case.recipe(SCALE, num_steps), draws or case.draws())
    simulation.speed = simulation.run()
    return simulation


# ------------------------------------------------------------------------------------------ promises


@pytest.fixture(scope="module")
def equal() -> Simulation:
    """The run of a fleet of equal servers."""
    return simulated(OF_NAME["all equal"])


@pytest.fixture
def equal_step_s(equal) -> float:
    return 1 / equal.speed.steps_per_s


@pytest.mark.parametrize(("name", "capacity"), [("one at 1/4", 23.25 / 24), ("one at 1/10", 23.1 / 24)])
def test_a_slow_server_costs_its_capacity_and_changes_no_draw(name, capacity, equal_step_s):
    simulation = simulated(OF_NAME[name])
    assert 1 / simulation.speed.steps_per_s <= 1.05 * equal_step_s / capacity
    assert simulation.fleet.counts["moves"] > 0 and simulation.fleet.counts["restarts"] == 0
    assert max(ages(simulation.trained, OF_NAME[name].train_batch_size // SCALE)) <= 8
    numbers = [group.prompt.index for group in simulation.trained]
    with_signal = [number for number, draw in enumerate(simulation.drawn) if draw.has_signal]
    assert numbers == with_signal[: len(numbers)], "in the order of draws, none left out"
    assert simulation.queue.account.num_discarded == 0 and simulation.queue.account.is_closed
    assert acceptance_bias(simulation.trained, OF_NAME[name].draws()) == pytest.approx(0)


def taking_turns(factor: float | None, num_servers: int, seconds: float) -> tuple[SpeedChange, ...]:
    """So many servers in turn change their speed, for so long."""
    changes = []
    for turn in range(int(400 * (NUM_STEPS + 18) / seconds)):
        for server in (number % 24 for number in range(turn * num_servers, (turn + 1) * num_servers)):
            changes.append(SpeedChange(turn * seconds, server, factor))
            changes.append(SpeedChange((turn + 1) * seconds - 1, server, 1.0))
    return tuple(sorted(changes, key=lambda change: change.at_s))


def bias_of_continued(factor: float | None):
    """Of responses that leave four servers at a time, each 200 s at this factor."""
    case = Case("turns", taking_turns(factor, num_servers=4, seconds=200.0))
    simulation = simulated(case)
    assert (simulation.fleet.counts["restarts"] > 0) == (factor is None)
    return bias(continued_lengths(simulation, case.draws()))


def test_moved_responses_are_as_long_as_if_they_had_stayed():
    moved = bias_of_continued(10.0)
    assert moved.number > 2000 and moved.half_width < 0.03
    assert moved.has_none, moved


def test_responses_begun_anew_fail_the_same_check():
    """Those under way are longer than others, by their variance over their mean."""
    anew = bias_of_continued(None)
    longer = 1 - LENGTHS.mean**2 / LENGTHS.mean_square
    assert not anew.has_none and anew.length == pytest.approx(-longer, abs=0.1)


def hedged(draws: Draws) -> Draws:
    """Of each group's last response a copy is started from its prefix, when all others are there;
    the first to end counts."""

    def draw(number: int) -> Draw:
        real = draws(number)
        *_, before, longest = sorted(real.lengths)
        last = real.lengths.index(longest)
        copies = (draws(number + 1_000_000 * (7 + copy)).lengths[last] for copy in range(1_000_000))
        copy = next(length for length in copies if length > before or before == longest)
        lengths = [*real.lengths[:last], min(longest, max(copy, before)), *real.lengths[last + 1 :]]
        return Draw(tuple(lengths), real.has_signal)

    return draw


def test_a_hedge_of_each_groups_last_response_makes_all_more_than_a_hundredth_shorter():
    case = OF_NAME["all equal"]
    beside_drawn = bias(trained_lengths(simulated(case, hedged(case.draws())).trained, case.draws()))
    assert beside_drawn.length + beside_drawn.half_width < -0.01


def test_one_loss_per_server_and_hour_makes_responses_shorter_by_what_the_bound_says():
    source = random.Random(3)
    losses = []
    num_steps = amount(20, 200)  # no loss is behind the first ones
    for server in range(24):
        at_s = source.expovariate(1 / 3600)
        while at_s < 400 * (num_steps + 18):
            losses += [SpeedChange(at_s, server, None), SpeedChange(at_s + 30, server, 1.0)]
            at_s += 30 + source.expovariate(1 / 3600)
    case = replace(OF_NAME["all equal"], changes=tuple(sorted(losses, key=lambda change: change.at_s)))
    beside_drawn = bias(trained_lengths(simulated(case, num_steps=num_steps).trained, case.draws()))
    bound = restart_bias_bound(1 / 3600, TOKEN_S, LENGTHS.mean, LENGTHS.mean_square)
    assert beside_drawn.length < -0.01
    assert beside_drawn.length == pytest.approx(-bound, abs=beside_drawn.half_width + 0.005)


def test_a_silent_server_is_given_up_after_half_a_minute_and_only_its_requests_begin_anew(equal_step_s):
    case = OF_NAME["one answers, writes nothing"]
    simulation = simulated(case)
    assert 0 < simulation.fleet.counts["restarts"] <= 128 // SCALE
    assert 1 / simulation.speed.steps_per_s <= 1.05 * equal_step_s * 24 / 23


def test_equal_servers_measured_with_noise_move_nothing_and_lose_no_time(equal):
    case, looked_at = OF_NAME["all equal"], equal
    machines = replace(case.machines(SCALE), changes=())
    not_looked_at = Simulation(machines, case.recipe(SCALE, NUM_STEPS), case.draws())
    assert looked_at.speed.steps_per_s == pytest.approx(not_looked_at.run().steps_per_s, rel=0.01)
    assert looked_at.fleet.counts["moves"] == looked_at.fleet.counts["slow"] == 0
    assert looked_at.fleet.largest_factor < 1.3


def test_without_staleness_the_last_answers_of_a_wave_leave_a_slow_server():
    """A wave ends with its longest answers: there a server at 1/4 would cost a seventh."""
    equal = Case("equal", max_staleness=0)
    slower = replace(equal, changes=OF_NAME["one at 1/4"].changes)
    step_s = {}
    for case in (equal, slower):
        simulation = Simulation(case.machines(SCALE), case.recipe(SCALE, 6), case.draws())
        step_s[case] = 1 / simulation.run().steps_per_s
    assert step_s[slower] <= 1.05 * step_s[equal] * 24 / 23.25
    assert simulation.fleet.counts["moves"] > 0


def test_without_staleness_equal_servers_move_nothing_either():
    """In full: on few seats chance alone makes servers uneven."""
    case = Case("equal", max_staleness=0)
    simulation = Simulation(case.machines(1), case.recipe(1, 1), case.draws())
    simulation.run()
    assert simulation.fleet.counts["moves"] == 0


@pytest.mark.parametrize("factor", [None, math.inf])
def test_a_simulation_without_any_server_left_ends_in_a_sentence(factor):
    machines = Machines(1, 4, 0.01, 1.0, 0.1, changes=(SpeedChange(0.5, 0, factor),))
    with pytest.raises(AssertionError, match="the trainer waits, and no request is in flight"):
        Simulation(machines, Recipe(4, 4, 2, 0, 100), random_draws(LENGTHS, 1.0, 2, seed=1)).run()


def test_a_simulation_waits_for_a_server_that_comes_back():
    changes = (SpeedChange(0.5, 0, None), SpeedChange(500.0, 0, 1.0))
    machines = Machines(1, 4, 0.01, 1.0, 0.1, changes=changes)
    assert Simulation(machines, Recipe(4, 4, 2, 0, 1), random_draws(LENGTHS, 1.0, 2, seed=1)).run().steps_per_s > 0


# ------------------------------------------------------------------------------------- moved tokens


@pytest.mark.parametrize("num_moves", [1, 3])
def test_responses_that_go_on_elsewhere_are_as_long_as_others(num_moves):
    """Moved after so many tokens whatever comes; beside the same responses unmoved."""
    draws = random_draws(LENGTHS, 1.0, 1, seed=5)
    simulation = Simulation(Machines(1, 1, 0.01, 1.0, 0.1), Recipe(1, 1, 1, 0, 1), draws)
    num_tokens, num_moved = Counter(), 0
    for number in range(amount(20_000, 100_000)):
        request = SimulatedRequest(number, "", draws(number).lengths[0], True, draw=number)
        num_tokens["unmoved"] += request.length
        for move in range(num_moves):
            if request.length > 3000 * (move + 1):
                request = replace(request, attempt=move + 1, earlier={0: 3000 * (move + 1)})
                request = replace(request, length=simulation.length_anew(request))
                num_moved += 1
        num_tokens["moved"] += request.length
    assert num_moved > 5000
    assert num_tokens["moved"] == pytest.approx(num_tokens["unmoved"], rel=0.01)


def test_a_moved_request_brings_its_tokens_with_their_versions_and_is_read_first():
    """0.1 s a token; 15 tokens of version 0, 5 of version 1 here, 10 of version 2 there."""
    machines = Machines(2, 2, token_s=0.1, train_s=0.0, push_s=0.0)
    here, there = SimulatedServer(machines, 0), SimulatedServer(machines, 1)
    here.add(SimulatedRequest(0, "a", 30, is_correct=True))
    here.add(SimulatedRequest(1, "a", 30, is_correct=True))
    for seconds, pushed in ((1.5, True), (0.55, False)):
        here.advance(seconds)
        there.advance(seconds)
        if pushed:
            here.push()
            there.push()
    assert here.progress()[0][1] == 20, "the 21st is not whole"
    request = here.progress()[0][0]
    num_tokens = here.abort(request)
    assert num_tokens == {0: 15, 1: 5} and here.load.num_requests == 1
    there.push()
    there.add(replace(request, earlier=num_tokens))
    assert there.seconds_to_next_end() == pytest.approx(20 / 15_000 + 10 * 0.1)
    there.advance(there.seconds_to_next_end())
    assert there.pop() == (replace(request, earlier=num_tokens), {0: 15, 1: 5, 2: 10})


def test_a_silent_server_writes_nothing_and_a_slow_one_takes_its_factor():
    server = SimulatedServer(Machines(1, 2, token_s=0.1, train_s=0.0, push_s=0.0))
    server.add(SimulatedRequest(0, "a", 10, is_correct=True))
    server.advance(0.5)
    server.factor = math.inf
    server.update()
    server.advance(100.0)
    assert server.is_silent and server.seconds_to_next_end() == math.inf
    server.factor = 4.0
    server.update()
    assert server.seconds_to_next_end() == pytest.approx(5 * 0.4)


# --------------------------------------------------------------------------------- restarts' bias


def test_the_bound_on_the_bias_of_restarts_by_hand():
    # lengths 10 and 30: mean 20, variance 100
    assert restart_bias_bound(0.001, 0.1, 20.0, 500.0) == pytest.approx(0.001 * 0.1 * 5)


@pytest.mark.parametrize(("hours", "expected"), [(1, 0.034), (4, 0.0085), (12, 0.0028)])
def test_responses_are_shorter_by_the_bound_at_most(hours, expected):
    """The exact mean: a response counts once it ends without a loss."""
    rate = TOKEN_S / (3600 * hours)
    lengths = LENGTHS.quantiles(20_000)
    weights = [math.exp(-rate * length) for length in lengths]
    mean = sum(map(math.prod, zip(lengths, weights, strict=True))) / sum(weights)
    bound = restart_bias_bound(1 / (3600 * hours), TOKEN_S, LENGTHS.mean, LENGTHS.mean_square)
    assert 0.9 * bound < 1 - mean / LENGTHS.mean <= bound
    assert bound == pytest.approx(expected, rel=0.05)


# ----------------------------------------------------------------------------------- the benchmark


def test_the_benchmark_runs_and_its_report_has_what_the_docs_show(tmp_path):
    simulate_fleet.main(["--quick", "--json", str(tmp_path / "fleet.json")])
    (result,) = json.loads((tmp_path / "fleet.json").read_text())["results"]
    assert result["with_rules"].keys() == result["before"].keys()
    assert result["with_rules"]["oldest"] <= 8


def test_the_table_of_the_docs_is_the_committed_one():
    results = json.loads((REPOSITORY / "benchmarks/results/fleet.json").read_text())["results"]
    assert [result["case"] for result in results] == [case.name for case in CASES]
    page = (REPOSITORY / "docs/rollout.md").read_text().splitlines()
    for result in results:
        assert f"| {' | '.join(simulate_fleet.row(result))} |" in page
        of_case = OF_NAME[result["case"]]
        assert result["with_rules"]["oldest"] <= of_case.max_staleness
        # of ten intervals of 95 % one may miss 0 by chance: these are half as wide again
        if not result["with_rules"]["num_restarts"]:
            assert abs(result["with_rules"]["length_bias"]) <= 1.5 * result["with_rules"]["length_bias_half_width"]


def test_the_page_shows_what_the_rules_are_worth():
    """A step beside what the capacity allows, of the committed figures."""
    of_case = {
        result["case"]: result
        for result in json.loads((REPOSITORY / "benchmarks/results/fleet.json").read_text())["results"]
    }
    equal = of_case["all equal"]["with_rules"]["step_s"]
    for name, capacity in (("one at 1/2", 23.5), ("one at 1/4", 23.25), ("one at 1/10", 23.1)):
        assert of_case[name]["with_rules"]["step_s"] <= 1.05 * equal * 24 / capacity
    assert of_case["one at 1/10"]["before"]["step_s"] > 2 * equal
    assert of_case["all equal"]["with_rules"]["moves_per_step"] == 0
