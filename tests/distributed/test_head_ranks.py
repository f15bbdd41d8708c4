"""The GPU tests' demands on two ranks hold over gloo, on float32 and small."""

from pathlib import Path

import pytest

from tests.helpers import run_torchrun

pytestmark = pytest.mark.distributed


def test_two_ranks_give_float64s_answers_and_each_others_bits():
    worker = Path(__file__).resolve().parents[1] / "head_ranks_worker.py"
    assert run_torchrun(worker, 2, "cpu", "small").count("agreed") == 2 * 2
