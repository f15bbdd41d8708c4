"""The heads over NCCL: the vocabulary, and with sequence parallelism the rows too, on two GPUs."""

from pathlib import Path

import pytest

from tests.helpers import run_torchrun

pytestmark = pytest.mark.gpu(count=2)


@pytest.mark.parametrize("shape", ["32b_tp8", "odd"])
def test_two_ranks_give_float64s_answers_and_each_others_bits(shape):
    worker = Path(__file__).resolve().parents[1] / "head_ranks_worker.py"
    assert run_torchrun(worker, 2, "cuda", shape).count("agreed") == 2 * 2
