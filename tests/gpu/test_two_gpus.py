"""Common work of tensor-parallel ranks over NCCL, on two GPUs: heads,
Transformer Engine's user buffers."""

import importlib.util
from pathlib import Path

import pytest

from tests.helpers import run_torchrun

TESTS = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.gpu(count=2)


@pytest.mark.parametrize("shape", ["32b_tp8", "odd"])
def test_two_ranks_give_float64s_answers_and_each_others_bits(shape):
    assert run_torchrun(TESTS / "head_ranks_worker.py", 2, "cuda", shape).count("agreed") == 2 * 2


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("megatron", "transformer_engine"))),
    reason="no transformer_engine and megatron-core",
)
def test_user_buffers_change_nothing_but_the_order_of_sums(tmp_path):
    from tests.tiny_models import make_tiny

    folder = make_tiny(tmp_path, "qwen3", vocab=512, layers=2, hidden=256, heads=4)
    assert run_torchrun(TESTS / "user_buffers_worker.py", 2, str(folder)).count("agreed") == 2
