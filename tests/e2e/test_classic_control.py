"""The algorithm functions of the trainer solve a task with a well-known answer."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean

import pytest
import torch

from examples.classic_control.train import CARTPOLE, ENV_STEPS, ENVIRONMENT, SOLVED, evaluate, training
from tests.proofs import few

pytestmark = pytest.mark.e2e

SEEDS = few((0, 1, 2), 1)


def solve(seed: int) -> list[float]:
    """Returns of 100 fresh episodes, of the first policy that solves them or else of the last."""
    torch.set_num_threads(1)
    for progress in training(ENVIRONMENT, CARTPOLE, ENV_STEPS, seed):
        if progress.state.step % 10 or not progress.recent or fmean(progress.recent[-20:]) < SOLVED:
            continue
        if fmean(returns := evaluate(progress.state, ENVIRONMENT, CARTPOLE)) >= SOLVED:
            return returns
    return evaluate(progress.state, ENVIRONMENT, CARTPOLE)


def test_cartpole_is_solved_with_every_seed():
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        results = dict(zip(SEEDS, pool.map(solve, SEEDS), strict=True))
    for seed, returns in results.items():
        assert len(returns) == 100 and fmean(returns) >= SOLVED, f"seed {seed}: {returns}"
