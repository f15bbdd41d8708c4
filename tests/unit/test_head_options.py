"""Fused kernels are used after a passed check, and given up loudly after a failed one."""

import logging
import math

import pytest

from megatron_dapo.config.loader import load_config
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.kernels.self_check import Error
from megatron_dapo.platform.agreement import Agreement
from megatron_dapo.training import head_options as module
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return read_model_spec(make_tiny(tmp_path_factory.mktemp("tiny") / "model", "qwen2"))


@pytest.fixture
def options(layout, spec):
    """actor.key=value ... -> arguments of the head; nothing is remembered from another test."""
    module._all_ranks_pass.cache_clear()
    return lambda *pairs: module.head_options(
        load_config(None, [f"actor_rollout_ref.actor.{pair}" for pair in pairs]), layout, spec
    )


@pytest.mark.parametrize("policy_loss", ["dapo", "cispo", "gspo", "sapo", "dppo_kl"])
def test_the_check_passes_on_this_machine_without_a_word(options, caplog, policy_loss):
    assert options(f"policy_loss={policy_loss}")["fused_head"] and not caplog.records


def test_off_means_off_without_a_check(options, monkeypatch):
    monkeypatch.setattr(module, "largest_errors", None)
    assert not options("fused_kernels=off")["fused_head"]


@pytest.mark.parametrize("error", [1.0, math.nan])
def test_a_kernel_that_differs_is_turned_off_with_a_loud_warning(options, monkeypatch, caplog, error):
    monkeypatch.setattr(module, "largest_errors", lambda *_: [Error("entropy", error, 1e-5), Error("loss", 0.0, 1e-5)])
    assert not options()["fused_head"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "THE FUSED KERNELS ARE OFF" in record.getMessage()
    assert "entropy off by" in record.getMessage() and "loss off" not in record.getMessage()


def test_a_kernel_that_does_not_even_run_is_turned_off_too(options, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(module, "largest_errors", broken)
    assert not options()["fused_head"]
    assert "RuntimeError: no compiler here" in caplog.text


def test_the_warning_names_the_cause_on_one_line(options, monkeypatch, caplog):
    def broken(*_):
        try:
            try:
                raise OSError("no space\nleft in the cache")
            except OSError:
                raise ValueError("the kernel is not compiled") from None
        except ValueError as error:
            error.__cause__ = FileNotFoundError("ptxas")
            raise RuntimeError("cannot launch") from error

    monkeypatch.setattr(module, "largest_errors", broken)
    assert not options()["fused_head"]
    expected = (
        "RuntimeError: cannot launch, caused by ValueError: the kernel is not compiled, "
        "caused by FileNotFoundError: ptxas)."
    )
    assert expected in caplog.text and "no space" not in caplog.text


def test_one_ranks_doubt_is_every_ranks(options, monkeypatch, caplog):
    monkeypatch.setattr(Agreement, "gather", lambda self, own: [own, "another rank's problem"])
    assert not options()["fused_head"] and not caplog.records


def test_actor_and_reference_share_one_check(options, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "largest_errors", lambda *arguments: asked.append(arguments) or [])
    assert options()["fused_head"] and options()["fused_head"] and len(asked) == 1


def test_the_chunk_is_1024_rows_on_a_cpu_unless_said_otherwise(options):
    assert options()["head_chunk_size"] == 1024
    assert options("log_prob_chunk_size=7")["head_chunk_size"] == 7
