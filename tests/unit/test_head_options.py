"""Fused kernels are used where their check passes, and given up loudly where it does not."""

import logging
import math

import pytest
import torch.distributed as dist

from megatron_dapo.config import ActorConfig
from megatron_dapo.platform import ParallelLayout
from megatron_dapo.training import head_options as module

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def layout():
    yield ParallelLayout.initialize()
    ParallelLayout.shutdown()


def fused(actor: ActorConfig, layout) -> bool:
    return module.head_options(actor, layout)["fused_head"]


def test_the_check_passes_on_this_machine_without_a_word(layout, caplog):
    assert fused(ActorConfig(), layout) and not caplog.records


def test_off_means_off_without_a_check(layout, monkeypatch):
    monkeypatch.setattr(module, "largest_error", None)
    assert not fused(ActorConfig(fused_kernels="off"), layout)


@pytest.mark.parametrize("error", [1.0, math.nan])
def test_a_kernel_that_differs_is_turned_off_with_a_loud_warning(layout, monkeypatch, caplog, error):
    from megatron_dapo.kernels.self_check import Error

    monkeypatch.setattr(module, "largest_error", lambda *_: [Error("entropy", error, 1e-5), Error("loss", 0.0, 1e-5)])
    assert not fused(ActorConfig(), layout)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "THE FUSED KERNELS ARE OFF" in record.getMessage()
    assert "entropy off by" in record.getMessage() and "loss off" not in record.getMessage()


def test_a_kernel_that_does_not_even_run_is_turned_off_too(layout, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(module, "largest_error", broken)
    assert not fused(ActorConfig(), layout)
    assert "RuntimeError: no compiler here" in caplog.text


def test_one_ranks_doubt_is_every_ranks(layout, monkeypatch, caplog):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: tensor.zero_())  # another rank's verdict
    assert not fused(ActorConfig(), layout) and not caplog.records


def test_the_chunk_is_1024_rows_on_a_cpu_unless_said_otherwise(layout):
    assert module.head_options(ActorConfig(), layout)["head_chunk_size"] == 1024
    assert module.head_options(ActorConfig(log_prob_chunk_size=7), layout)["head_chunk_size"] == 7
