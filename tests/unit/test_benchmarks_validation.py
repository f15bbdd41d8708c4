"""What a held-out evaluation costs a step: the committed figures, and how they are made."""

import json

import pytest

from benchmarks.bench_validation import NUM_HELD_OUT, Cost, compared, mean_cost
from megatron_dapo.commands.plan.simulation import Machines, Recipe
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

RESULTS = REPOSITORY / "benchmarks" / "results" / "validation_cpu.json"


def test_costs_are_means_over_rounds():
    costs = [Cost(*(float(value) for value in range(start, start + 6))) for start in (0, 2)]
    assert mean_cost(costs) == Cost(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


def test_an_evaluation_costs_what_its_tokens_do_where_servers_are_full_and_little_else():
    """Held up is nobody: no push waits for an answer."""
    by_bottleneck = {row["bottleneck"]: row for row in json.loads(RESULTS.read_text())["results"]}
    assert by_bottleneck["the trainer"]["more"] < 0.05
    assert by_bottleneck["the servers"]["more"] < by_bottleneck["the servers"]["more_tokens"] + 0.05
    for row in by_bottleneck.values():
        assert row["with"]["push_waits_s"] < 0.01 * row["with"]["step_s"]
        assert row["with"]["val_tokens"] > 0 == row["without"]["val_tokens"]


def test_a_run_of_two_steps_keeps_all_answers_of_the_right_weights():
    """`compared` asserts both."""
    machines = Machines(num_servers=1, slots_per_server=16, token_s=0.0002, train_s=0.05, push_s=0.01)
    recipe = Recipe(train_batch_size=2, gen_batch_size=8, n=4, max_staleness=1, num_steps=1)
    result = compared("none", machines, recipe, rounds=1)
    assert result["with"]["val_tokens"] >= NUM_HELD_OUT * recipe.n
