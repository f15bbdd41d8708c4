"""Keys of LoRA: each mistake is one sentence with key, value and cure; effects on the plan."""

import json

import pytest

from megatron_dapo.checks.run_checks import validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import parallel_sizes
from megatron_dapo.config.loader import load_config
from megatron_dapo.estimates.memory import num_parameters, num_trained_parameters, trainer_memory
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.huggingface.lora_settings import actor_is_reference, lora_settings
from megatron_dapo.huggingface.model_tensors import linear_modules
from megatron_dapo.huggingface.spec_reader import model_spec
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

MODEL = "actor_rollout_ref.model"
MEGATRON = "actor_rollout_ref.actor.megatron"
RANK = f"{MODEL}.lora_rank=16"
QWEN = linear_modules(model_spec(model_json_named("qwen3-8b")))


def mistakes(*overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        validate(load_config(None, list(overrides)), model_json_named("qwen3-8b"), check_files=False)
    return list(error.value.sentences)


@pytest.mark.parametrize(
    "overrides, named",
    [
        ([RANK, f"{MODEL}.target_modules=[q_proj, qkv_proj]"], ["target_modules has qkv_proj", "q_proj, k_proj"]),
        ([RANK, f"{MODEL}.target_modules=linear_qkv"], ["target_modules", "linear_qkv", "all-linear"]),
        (
            [RANK, f"{MODEL}.target_modules=[q_proj, gate_up_proj]"],
            ["gate_up_proj", "Qwen3ForCausalLM has none", "up_proj"],
        ),
        ([RANK, f"{MODEL}.target_modules=[]"], ["target_modules", "names no module"]),
        ([f"{MODEL}.lora_alpha=32"], ["lora_alpha is 32", "lora_rank is 0", "set lora_rank"]),
        ([f"{MODEL}.target_modules=q_proj"], ["target_modules is q_proj", "lora_rank is 0"]),
        ([RANK, "algorithm.adv_estimator=gae"], ["lora_rank is 16", "critic", "set lora_rank to 0"]),
        ([RANK, f"{MEGATRON}.fp8=hybrid"], ["fp8 is hybrid", "lora_rank 16", "set fp8 to none"]),
    ],
)
def test_a_mistake_is_one_sentence(overrides, named):
    sentences = mistakes(*overrides)
    assert len(sentences) == 1 and all(word in sentences[0] for word in named), sentences


@pytest.mark.parametrize(
    "changed, key",
    [
        ({"r": 8}, "lora_rank is 16, but"),
        ({"lora_alpha": 64}, "lora_alpha is 16"),
        ({"target_modules": ["q_proj"]}, "target_modules is ["),
        ({"use_rslora": True}, "use_rslora true"),
        ({"bias": "all"}, 'bias "all"'),
        ({"peft_type": "IA3"}, "not of a LoRA adapter"),
        (None, "no readable adapter_config.json"),
    ],
)
def test_an_adapter_that_does_not_fit_is_named_with_what_it_has(tmp_path, changed, key):
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": list(QWEN), "bias": "none"}
    if changed is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | changed))
        (tmp_path / "adapter_model.safetensors").touch()
    model = make_tiny(tmp_path / "model", "qwen3", layers=1)
    config = load_config(None, [RANK, f"{MODEL}.path={model}", f"{MODEL}.lora_adapter_path={tmp_path}"])
    with pytest.raises(UserError) as error:
        validate(config, None)
    named = [sentence for sentence in error.value.sentences if "adapter" in sentence]
    assert len(named) == 1 and key in named[0], named


def test_targets_are_in_the_order_of_a_layer_and_one_name_is_a_list_of_one():
    config = load_config(None, [RANK, f"{MODEL}.target_modules=[down_proj, q_proj]"])
    assert lora_settings(config).targets == ("q_proj", "down_proj")
    assert lora_settings(load_config(None, [RANK, f"{MODEL}.target_modules=up_proj"])).targets == ("up_proj",)
    assert lora_settings(load_config(None, [])) is None


def test_the_plan_counts_frozen_weights_at_two_bytes_and_no_reference():
    """Qwen3-8B: rank 16 has 43.6 M parameters (0.5 %);
    full training takes 18 bytes each of 8.2 G."""
    spec = model_spec(model_json_named("qwen3-8b"))
    kl = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1"]
    config = load_config(None, [RANK, *kl, f"{MEGATRON}.use_distributed_optimizer=false"])
    shapes = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 12288), (4096, 12288), (12288, 4096)]
    number = 36 * 16 * sum(rows + columns for rows, columns in shapes)
    sizes = parallel_sizes(config)
    assert num_trained_parameters(spec, sizes, 0, lora_settings(config)) == (number, 0)
    full = load_config(None, [*kl, f"{MEGATRON}.use_distributed_optimizer=false"])
    own, whole = trainer_memory(config, spec), trainer_memory(full, spec)
    weights = sum(num_parameters(spec, sizes, 0))
    assert own.weights == 2 * (weights + number) and own.gradients == 4 * number and own.optimizer == 12 * number
    assert whole.gradients == 4 * weights and whole.optimizer == 12 * weights
    assert own.reference == 0 and whole.reference == 2 * weights and actor_is_reference(config)
    other = load_config(None, [RANK, *kl, "actor_rollout_ref.ref.path=elsewhere"])
    assert trainer_memory(other, spec).reference == 2 * weights
