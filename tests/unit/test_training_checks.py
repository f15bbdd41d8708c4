"""What the GPU tests ask of layers and policy, asked of the CPU at small sizes."""

import pytest
import torch

from megatron_dapo.platform.parallel import ParallelLayout
from tests import training_checks as checks
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def layout():
    yield ParallelLayout.initialize()
    ParallelLayout.shutdown()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3", layers=2, hidden=32, heads=4)


def test_packed_attention_is_that_of_its_segments():
    checks.check_packed_attention(torch.device("cpu"), torch.float32, [5, 1, 33, 16], bound=1e-5)


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
    """Also where near ties send some tokens to other experts."""
    path = make_tiny(tmp_path, "qwen3_moe", layers=2, hidden=32, heads=4)
    exact, half = ([f"{checks.MEGATRON}.dtype={dtype}"] for dtype in ("float32", "bfloat16"))
    checks.check_gradients(layout, path, exact, half)
    with pytest.raises(AssertionError, match=" of "):
        checks.check_gradients(layout, path, exact, [*exact, f"{checks.ACTOR}.entropy_coef=1"])
