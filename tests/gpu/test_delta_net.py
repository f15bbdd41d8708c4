"""Gated delta nets by flash-linear-attention's kernels; needs fla-core and megatron-core."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("fla") is None:
    pytest.skip("no CUDA GPU with fla-core, or megatron-core is not installed", allow_module_level=True)

from megatron_dapo.platform.parallel import ParallelLayout
from tests import training_checks as checks
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.gpu

OURS = [f"{checks.MEGATRON}.use_transformer_engine=off"]
# of two orders of summation in bfloat16; and of such, in a random model with log-probs down to -20
BF16_VALUES, BF16_LOG_PROBS = 0.02, 0.05
WIDE = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}


@pytest.fixture(scope="module")
def layout():
    yield ParallelLayout.initialize()
    ParallelLayout.shutdown()


@pytest.mark.parametrize("lengths", [(1, 63, 64, 65, 300), (2048, 5, 1000)])
def test_the_kernels_read_the_states_that_the_formula_in_float64_does(device, lengths):
    checks.check_delta_rule(device, torch.bfloat16, lengths, BF16_VALUES)


def test_log_probs_of_a_hybrid_do_not_depend_on_the_packing_and_its_tensors_come_out_as_they_went_in(layout, tmp_path):
    path = make_tiny(tmp_path / "model", "qwen3_5", vocab=512, layers=4, hidden=256, heads=4, more=WIDE)
    checks.check_packed_is_padded(layout, path, OURS, BF16_LOG_PROBS)
    checks.check_export(layout, path, OURS, tmp_path / "export")


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_hybrids_gradients_and_steps_in_half_precision_are_near_those_of_the_formula(layout, tmp_path, family):
    """In float32 a GPU computes the formula. A mixture's tokens go to all experts."""
    path = make_tiny(tmp_path, family, vocab=512, layers=2, hidden=256, heads=4, more=WIDE, **checks.ALL_EXPERTS)
    float32, half = ([*OURS, f"{checks.MEGATRON}.dtype={dtype}"] for dtype in ("float32", "bfloat16"))
    checks.check_gradients(layout, path, float32, half)
    steps = []
    for overrides in (float32, half):
        policy, mini_batches = checks.policy_and_mini_batches(layout, path, overrides)
        steps.append(policy.update(mini_batches, weight_version=0))
    for name in ("actor/entropy", "actor/grad_norm"):
        assert steps[1][name] == pytest.approx(steps[0][name], rel=BF16_VALUES), name
