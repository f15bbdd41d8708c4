"""Layers and policy on a GPU in bf16; only where megatron-core is installed."""

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
BF16_LOG_PROBS = 0.05  # mean difference of two orders of summation, in a random model whose log-probs reach -20


@pytest.fixture(scope="module")
def layout():
    yield ParallelLayout.initialize()
    ParallelLayout.shutdown()


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "glm4", "gemma3"])
def model_path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return make_tiny(folder, request.param, vocab=512, layers=2, hidden=256, heads=4)


def test_packed_attention_is_that_of_its_segments(device):
    # inputs, products and results are rounded to 8 bits a few times
    checks.check_packed_attention(device, torch.bfloat16, [700, 1, 33, 2048, 129], bound=1e-2)


def test_a_step_with_the_fused_head_is_that_with_the_composed_one(layout, model_path):
    checks.check_fused_step(layout, model_path, rel=2e-2)


def test_more_micro_batches_cost_no_more_waiting_for_the_device(layout, model_path):
    checks.check_host_reads(layout, model_path)


def test_log_probs_do_not_depend_on_the_packing(layout, model_path):
    checks.check_packed_is_padded(layout, model_path, OURS, BF16_LOG_PROBS)


def test_every_tensor_comes_out_as_it_went_in(layout, model_path, tmp_path):
    checks.check_export(layout, model_path, OURS, tmp_path)
