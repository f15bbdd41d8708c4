"""The GPU tests' demands on layers and policy, on the CPU at small sizes."""

import pytest
import torch

from tests import training_checks as checks
from tests.tiny_models import make_tiny

# after tests.training_checks, which prepares megatron.core for this machine
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "changes", [{}, {"window": 7}, {"sinks": True}, {"window": 7, "sinks": True, "dim": 16}], ids=str
)
def test_packed_attention_is_that_of_its_segments(changes):
    attention = checks.Attention((5, 1, 33, 16), **changes)
    checks.check_packed_attention(torch.device("cpu"), torch.float32, attention, bound=1e-5)


def test_variable_length_attention_is_called_with_the_arguments_of_its_torch_version(monkeypatch):
    """torch 2.11 groups heads without being told; later versions ask for enable_gqa."""
    calls = []

    def of_torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        calls.append((scale, window_size, None))
        return query

    def of_torch_2_13(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        calls.append((scale, window_size, enable_gqa))
        return query

    layer = checks.Attention((3, 2), window=4).layer(torch.device("cpu"), torch.bfloat16)
    query, key, bounds = torch.zeros(5, 8, 64), torch.zeros(5, 2, 64), torch.tensor([0, 3, 5])
    for function in (of_torch_2_11, of_torch_2_13):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        layer._varlen(query, key, key, PackedSeqParams("thd", bounds, bounds, max_seqlen_q=3, max_seqlen_kv=3))
    assert calls == [(1 / 8, (4, 0), None), (1 / 8, (4, 0), True)]


def test_steps_of_an_offloaded_optimizer_are_compared_and_another_rate_would_be_noticed(layout, model_path):
    exact, sharded = [f"{checks.MEGATRON}.dtype=float32"], [f"{checks.MEGATRON}.use_distributed_optimizer=true"]
    checks.check_steps(layout, model_path, exact, [*exact, *sharded], rel=1e-4)
    with pytest.raises(AssertionError, match=" of "):
        checks.check_steps(layout, model_path, exact, [*exact, f"{checks.ACTOR}.optim.lr=2e-6"], rel=1e-4)


def test_a_step_with_the_fused_head_is_that_with_the_composed_one(layout, model_path):
    checks.check_fused_step(layout, model_path, rel=1e-5)


def test_more_micro_batches_cost_no_more_waiting_for_the_device(layout, model_path):
    checks.check_host_reads(layout, model_path)


def test_log_probs_do_not_depend_on_the_packing(layout, model_path):
    checks.check_packed_is_padded(layout, model_path, [], bound=1e-6)


def test_every_tensor_comes_out_as_it_went_in(layout, model_path, tmp_path):
    checks.check_export(layout, model_path, [], tmp_path)


def test_other_layers_would_be_noticed(layout, model_path):
    hot = ["actor_rollout_ref.rollout.temperature=1.1"]
    with pytest.raises(AssertionError, match="log-probs differ"):
        checks.check_agreement(layout, model_path, [], hot, bound=1e-3)


def test_gradients_in_half_precision_are_near_and_those_of_another_loss_would_be_noticed(layout, tmp_path):
    """Even if near ties send some tokens to other experts."""
    path = make_tiny(tmp_path, "qwen3_moe", layers=2, hidden=32, heads=4)
    exact, half = ([f"{checks.MEGATRON}.dtype={dtype}"] for dtype in ("float32", "bfloat16"))
    checks.check_gradients(layout, path, exact, half)
    with pytest.raises(AssertionError, match=" of "):
        checks.check_gradients(layout, path, exact, [*exact, f"{checks.ACTOR}.entropy_coef=1"])
