"""Layers and policy on a GPU in bf16; needs megatron-core."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed: the kernels are tested without it", allow_module_level=True)

from megatron_dapo.platform.parallel import ParallelLayout
from tests import training_checks as checks
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.gpu

OURS = [f"{checks.MEGATRON}.use_transformer_engine=off"]
# mean difference of two orders of summation, in a random model with log-probs down to -20
BF16_LOG_PROBS = 0.05


@pytest.fixture(scope="module")
def layout():
    yield ParallelLayout.initialize()
    ParallelLayout.shutdown()


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "glm4", "gemma3"])
def model_path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return make_tiny(folder, request.param, vocab=512, layers=2, hidden=256, heads=4)


ATTENTIONS = {
    **{f"dim {dim}": {"dim": dim} for dim in (64, 128, 256)},
    **{f"dim {dim}, window": {"dim": dim, "window": 128} for dim in (64, 128, 256)},
    "a window longer than most segments": {"window": 1024},
    **{f"dim {dim}, sinks": {"dim": dim, "sinks": True} for dim in (64, 128)},
    "window and sinks": {"window": 128, "sinks": True},
    "long segments": {"lengths": (12288, 5, 9000), "heads": 2, "kv_heads": 1, "dim": 128},
    "a window in long segments": {"lengths": (12288, 5), "heads": 2, "kv_heads": 1, "window": 1024},
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_packed_attention_is_that_of_its_segments(device, name):
    # inputs, products and results are rounded to 8 bits a few times
    attention = checks.Attention(**{"lengths": (700, 1, 33, 2048, 129)} | ATTENTIONS[name])
    checks.check_packed_attention(device, torch.bfloat16, attention, bound=1e-2)


def test_a_step_with_the_fused_head_is_that_with_the_composed_one(layout, model_path):
    checks.check_fused_step(layout, model_path, rel=2e-2)


def test_more_micro_batches_cost_no_more_waiting_for_the_device(layout, model_path):
    checks.check_host_reads(layout, model_path)


def test_log_probs_do_not_depend_on_the_packing(layout, model_path):
    checks.check_packed_is_padded(layout, model_path, OURS, BF16_LOG_PROBS)


def test_every_tensor_comes_out_as_it_went_in(layout, model_path, tmp_path):
    checks.check_export(layout, model_path, OURS, tmp_path)


FLOAT32 = [f"{checks.MEGATRON}.dtype=float32"]


def test_a_gather_of_weights_under_the_forward_pass_changes_no_step(layout, model_path):
    """In float32: half-precision weights do not move by a step of this learning rate."""
    sharded = [*OURS, *FLOAT32, f"{checks.MEGATRON}.use_distributed_optimizer=true"]
    overlapped = [f"{checks.MEGATRON}.overlap_grad_reduce=true", f"{checks.MEGATRON}.overlap_param_gather=true"]
    checks.check_steps(layout, model_path, sharded, [*sharded, *overlapped], rel=1e-3)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss"])
def test_a_mixtures_gradients_in_half_precision_are_near_those_in_float32(layout, tmp_path, family):
    path = make_tiny(tmp_path, family, vocab=512, layers=2, hidden=256, heads=4, **checks.ALL_EXPERTS)
    checks.check_gradients(layout, path, [*OURS, *FLOAT32], OURS)
