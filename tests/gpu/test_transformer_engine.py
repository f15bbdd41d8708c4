"""Transformer Engine's layers: the same model as ours, and FP8 near it; needs both packages."""

import importlib.util

import pytest

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("transformer_engine") is None:
    pytest.skip("no CUDA GPU with transformer_engine and megatron-core", allow_module_level=True)

from megatron_dapo.huggingface.model_tensors import linear_modules
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.policy import Policy
from tests import training_checks as checks
from tests.peft_adapters import make_adapter
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.gpu

OURS, ITS = ([f"{checks.MEGATRON}.use_transformer_engine={word}"] for word in ("off", "on"))
# mean difference of two orders of summation, in a random model with log-probs down to -20
BF16_LOG_PROBS = 0.05
FP8_LOG_PROBS = 0.5  # 3 bits of mantissa
# near ties send a few tokens to other experts: between float32 and bfloat16 on a CPU 0.054 for this
# model of Qwen3-MoE
ROUTED_LOG_PROBS = 0.2
# keys of 192 and values of 128: those for which Transformer Engine has a kernel
DEEPSEEK_WIDTHS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DENSE = ["qwen2", "qwen3", "llama", "glm4", "gemma3"]
MIXTURES = ["qwen3_moe", "glm4_moe", "gpt_oss"]


@pytest.fixture(scope="module")
def layout():
    yield ParallelLayout.initialize()
    ParallelLayout.shutdown()


@pytest.fixture(scope="module", params=DENSE)
def model_path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return make_tiny(folder, request.param, vocab=512, layers=2, hidden=256, heads=4)


def test_its_layers_give_our_log_probs(layout, model_path):
    checks.check_agreement(layout, model_path, OURS, ITS, BF16_LOG_PROBS)


def test_its_layers_with_a_latent_attention_give_our_log_probs(layout, tmp_path):
    path = make_tiny(tmp_path, "deepseek_v3", vocab=512, layers=2, hidden=256, heads=4, more=DEEPSEEK_WIDTHS)
    checks.check_agreement(layout, path, OURS, ITS, ROUTED_LOG_PROBS)
    checks.check_packed_is_padded(layout, path, ITS, ROUTED_LOG_PROBS)
    checks.check_gradients(layout, path, OURS, ITS)
    checks.check_export(layout, path, ITS, tmp_path / "export")


def test_its_log_probs_do_not_depend_on_the_packing(layout, model_path):
    checks.check_packed_is_padded(layout, model_path, ITS, BF16_LOG_PROBS)


def test_every_tensor_comes_out_as_it_went_in(layout, model_path, tmp_path):
    """Its norms live inside the products that follow them: the weight map knows those names."""
    checks.check_export(layout, model_path, ITS, tmp_path)


def test_adapters_beside_its_layers_give_the_log_probs_of_those_beside_ours(layout, model_path, tmp_path):
    make_adapter(tmp_path / "adapter", model_path, rank=4, alpha=8)
    model = "actor_rollout_ref.model"
    lora = [f"{model}.lora_rank=4", f"{model}.lora_alpha=8", f"{model}.lora_adapter_path={tmp_path / 'adapter'}"]
    checks.check_agreement(layout, model_path, [*OURS, *lora], [*ITS, *lora], BF16_LOG_PROBS)
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, [*ITS, *lora])
    assert policy.update(mini_batches, weight_version=0)["actor/grad_norm"] > 0


def has_grouped_product(policy: Policy) -> bool:
    return "TEGroupedMLP" in {type(module).__name__ for module in policy.model.chunks[0].modules()}


@pytest.mark.parametrize("model_path", MIXTURES, indirect=True)
def test_the_grouped_product_of_a_ranks_experts_equals_ours(layout, model_path, tmp_path):
    """Ours, and its own with adapters, which change nothing yet, are computed one after the other.
    A grouped product stands beside adapters of the attention only, and for experts without modules
    (gpt-oss)."""
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, ITS)
    assert has_grouped_product(policy)
    assert policy.update(mini_batches, weight_version=0)["actor/expert_dropped"] == 0.0
    checks.check_agreement(layout, model_path, OURS, ITS, ROUTED_LOG_PROBS)
    lora = "actor_rollout_ref.model.lora_rank=4"
    for targets in ("all-linear", "[o_proj]"):
        beside = [*ITS, lora, f"actor_rollout_ref.model.target_modules={targets}"]
        one_by_one = targets == "all-linear" and "down_proj" in linear_modules(policy.model.spec)
        assert has_grouped_product(checks.policy_and_mini_batches(layout, model_path, beside)[0]) is not one_by_one
        checks.check_agreement(layout, model_path, beside, ITS, ROUTED_LOG_PROBS)
    checks.check_export(layout, model_path, ITS, tmp_path)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixtures_gradients_are_near_ours(layout, tmp_path, family):
    path = make_tiny(tmp_path, family, vocab=512, layers=2, hidden=256, heads=4, **checks.ALL_EXPERTS)
    checks.check_gradients(layout, path, OURS, ITS)


@pytest.mark.parametrize("kind", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_fp8_is_near_and_trains(layout, model_path, recipe, kind):
    fp8 = [*ITS, f"{checks.MEGATRON}.fp8={kind}", f"{checks.MEGATRON}.fp8_recipe={recipe}"]
    checks.check_agreement(layout, model_path, ITS, fp8, FP8_LOG_PROBS)
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, fp8)
    assert policy.update(mini_batches, weight_version=0)["actor/grad_norm"] > 0


def test_an_optimizer_in_the_machines_memory_takes_the_steps_of_one_on_the_gpu(layout, model_path):
    """At a learning rate large enough to move half-precision weights;
    the allowed difference is its rounding."""
    fast = [*ITS, f"{checks.ACTOR}.optim.lr=1e-2", f"{checks.MEGATRON}.use_distributed_optimizer=true"]
    offloaded = [f"{checks.MEGATRON}.optimizer_offload_fraction=1.0"]
    checks.check_steps(layout, model_path, fast, [*fast, *offloaded], rel=2e-2)
