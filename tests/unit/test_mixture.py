"""A layer's mixture of experts is that of transformers, in outputs and gradients."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import ParallelSizes
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig, OptimConfig
from megatron_dapo.estimates.layer_memory import kept_per_token
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models.build import ModelParts, build_model, layers_with_experts
from megatron_dapo.models.hf_io import export_hf, load_hf_weights
from megatron_dapo.models.weight_source import WeightSource
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.expert_load_metrics import load_metrics
from megatron_dapo.training.optimizer import make_training_state
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

HIDDEN, EXPERTS = 32, 8


@pytest.mark.parametrize(("norm_topk_prob", "experts_per_token"), [(True, 2), (False, 3), (False, 1)])
def test_outputs_and_gradients_of_the_experts_and_the_router_are_those_of_transformers(
    layout, tmp_path, norm_topk_prob, experts_per_token
):
    path = make_tiny(
        tmp_path, "qwen3_moe", layers=1, hidden=HIDDEN, num_experts=EXPERTS,
        norm_topk_prob=norm_topk_prob, experts_per_token=experts_per_token,
    )  # fmt: skip
    model = build_model(read_model_spec(path), layout, MegatronConfig())
    load_hf_weights(model, path, layout)
    assert_layer_is_that_of_transformers(model, layout, path, layer=0)


@pytest.mark.parametrize(
    ("experts_per_token", "more"),
    [(2, {}), (4, dict(n_group=4, topk_group=2, n_shared_experts=2)), (1, dict(norm_topk_prob=False))],
)
def test_a_sigmoid_router_and_shared_experts_are_those_of_transformers(layout, tmp_path, experts_per_token, more):
    path = make_tiny(
        tmp_path, "glm4_moe", layers=2, hidden=HIDDEN, num_experts=EXPERTS, experts_per_token=experts_per_token,
        more=more,
    )  # fmt: skip
    model = build_model(read_model_spec(path), layout, MegatronConfig())
    load_hf_weights(model, path, layout)
    assert_layer_is_that_of_transformers(model, layout, path, layer=1)


def test_biased_experts_with_a_limit_are_those_of_transformers(layout, tmp_path):
    path = make_tiny(tmp_path, "gpt_oss", layers=1, hidden=HIDDEN, num_experts=EXPERTS, experts_per_token=3)
    model = build_model(read_model_spec(path), layout, MegatronConfig())
    load_hf_weights(model, path, layout)
    assert_layer_is_that_of_transformers(model, layout, path, layer=0)


def test_the_plan_counts_what_backward_keeps_of_experts_with_a_limit(layout, tmp_path):
    """Beside a float32 probability per token and expert, which it leaves out."""
    path = make_tiny(tmp_path, "gpt_oss", layers=1, hidden=HIDDEN, num_experts=EXPERTS, experts_per_token=3)
    model = build_model(read_model_spec(path), layout, MegatronConfig(dtype="bfloat16"))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.chunks[0].parameters()}
    kept = {}  # by storage

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    num_tokens = 50
    x, probabilities = torch.randn(num_tokens, HIDDEN).bfloat16().requires_grad_(), torch.rand(num_tokens)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layers_with_experts(model.chunks[0])[0].mlp.experts.local_experts[0](
            x, per_token_scale=probabilities.requires_grad_()
        )
    assert output
    measured = sum(size for place, size in kept.items() if place not in parameters)
    planned = kept_per_token(model.spec, ParallelSizes(tp=1, pp=1, vpp=None, world=1), 2, 1, [0]).mlp
    assert measured == num_tokens * (planned / 3 + 4)


def assert_layer_is_that_of_transformers(model: ModelParts, layout: ParallelLayout, path: Path, layer: int) -> None:
    """Compare the outputs and all gradients of a layer's experts with those
    of transformers in float64."""
    generator = torch.Generator().manual_seed(0)
    x, outgoing = (torch.randn(24, 1, HIDDEN, generator=generator) for _ in range(2))
    ours_in = x.clone().requires_grad_()
    is_token = torch.arange(24) < 20
    with model.chunks[0].expert_load.during(is_token):
        ours, _ = model.chunks[0].decoder.layers[layer].mlp(ours_in)
    ours.backward(outgoing)
    gradients = WeightSource(model, layout, value=lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
    prefix = f"model.layers.{layer}.mlp."
    specs = [spec for spec in gradients.specs() if spec.name.startswith(prefix)]
    got = {spec.name: value for spec, value in zip(specs, gradients.gather(specs), strict=True)}

    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    block = oracle.model.layers[layer].mlp
    exact_in = x.double().transpose(0, 1).requires_grad_()  # [B, S, H] there
    is_gpt_oss = hasattr(block, "router")
    exact, *_ = block(exact_in) if is_gpt_oss else (block(exact_in),)
    exact.backward(outgoing.double().transpose(0, 1))
    _, _, chosen = (block.router if is_gpt_oss else block.gate)(exact_in[0])
    counts = chosen[is_token].flatten().bincount(minlength=EXPERTS).tolist()
    assert model.chunks[0].expert_load.counts[-1].tolist() == [*counts, 20 * chosen.size(1)]
    expected = {name: value.grad for name, value in block.named_parameters() if not name.startswith("experts.")}
    # the bias gets no gradient
    expected |= {name: torch.zeros_like(value) for name, value in block.named_buffers()}
    if is_gpt_oss:
        expected |= {name: value.grad for name, value in block.named_parameters()}
    for e in range(0 if is_gpt_oss else EXPERTS):
        gate, up = block.experts.gate_up_proj.grad[e].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": block.experts.down_proj.grad[e]}
        expected |= {f"experts.{e}.{part}.weight": value for part, value in parts.items()}

    assert {name.removeprefix(prefix) for name in got} == expected.keys()
    pairs = {"output": (ours[:, 0], exact[0]), "input": (ours_in.grad[:, 0], exact_in.grad[0])}
    pairs |= {name: (got[prefix + name], value) for name, value in expected.items()}
    for name, (value, reference) in pairs.items():
        # sums of some tens of float32 products, rounded to 6e-8 each, and a softmax
        assert (value.double() - reference).abs().max() <= 2e-6 * reference.abs().max() + 1e-7, name


def test_a_layer_of_multi_token_prediction_is_left_where_config_json_names_it(layout, tmp_path):
    path = make_tiny(tmp_path / "model", "glm4_moe", layers=2, hidden=HIDDEN, num_experts=EXPERTS)
    tensors = load_file(path / "model.safetensors") | {"model.layers.2.eh_proj.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    model = build_model(read_model_spec(path), layout, MegatronConfig())
    load_hf_weights(model, path, layout)
    export_hf(model, layout, path, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() - exported.keys() == {"model.layers.2.eh_proj.weight"}
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="1 unexpected: model.layers.2.eh_proj.weight"):
        load_hf_weights(build_model(read_model_spec(path), layout, MegatronConfig()), path, layout)


def test_the_load_by_hand():
    """Two layers of four experts, two for each of six tokens: even, and 6, 4, 1 of 12,
    of which one is lost."""
    metrics = load_metrics(torch.tensor([[3, 3, 3, 3, 12], [6, 4, 1, 0, 12]]))
    shares = [6 / 11, 4 / 11, 1 / 11]
    entropy = -sum(share * math.log(share) for share in shares) / math.log(4)
    assert metrics == pytest.approx(
        {
            "actor/expert_load_max": 4 * 6 / 11,
            "actor/expert_load_entropy": (1 + entropy) / 2,
            "actor/expert_dropped": 1 / 24,
        }
    )


def test_a_step_in_half_precision_leaves_the_bias_by_which_a_router_chooses_to_the_bit(layout, tmp_path):
    """Megatron converts a model when it wraps it, and its optimizer steps all parameters
    with a gradient."""
    path = make_tiny(tmp_path, "glm4_moe", layers=2, hidden=HIDDEN, num_experts=EXPERTS)
    model = build_model(read_model_spec(path), layout, MegatronConfig(dtype="bfloat16"))
    load_hf_weights(model, path, layout)
    state = make_training_state(model, MegatronConfig(dtype="bfloat16"), OptimConfig(lr=1e-2), 1)
    router = model.chunks[0].decoder.layers[1].mlp.router
    before = router.weight.detach().clone()
    for parameter in model.chunks[0].parameters():
        if parameter.requires_grad:
            parameter.main_grad.fill_(0.01)
    state.step()
    expected = load_file(path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert not torch.equal(router.weight, before)
    assert router.expert_bias.dtype == torch.float32 and torch.equal(router.expert_bias, expected)
    assert not torch.equal(expected, expected.bfloat16().float())
