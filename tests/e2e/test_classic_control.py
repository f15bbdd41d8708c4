"""The algorithm functions of the trainer solve a task whose answer everybody knows."""

import time

import pytest

from examples.classic_control.train import CARTPOLE, ENV_STEPS, ENVIRONMENT, SOLVED, evaluate, training

pytestmark = pytest.mark.e2e

SEEDS = (0, 1, 2)


def test_cartpole_is_solved_with_three_seeds_in_two_minutes():
    started = time.process_time()
    for seed in SEEDS:
        *_, last = training(ENVIRONMENT, CARTPOLE, ENV_STEPS, seed)
        returns = evaluate(last.state, ENVIRONMENT, CARTPOLE)
        assert len(returns) == 100 and sum(returns) / 100 >= SOLVED, f"seed {seed}: {returns}"
    assert time.process_time() - started < 120  # of one thread; the clock on the wall is the neighbours' too
