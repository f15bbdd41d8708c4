"""A layer's mixture of experts is that of transformers, in outputs and gradients."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.huggingface.model_spec import read_model_spec
from megatron_dapo.models.build import build_model
from megatron_dapo.models.hf_io import load_hf_weights
from megatron_dapo.models.weight_source import WeightSource
from megatron_dapo.platform.parallel import ParallelLayout
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

HIDDEN, EXPERTS = 32, 8


@pytest.fixture(scope="module")
def layout():
    yield ParallelLayout.initialize()
    ParallelLayout.shutdown()


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
    generator = torch.Generator().manual_seed(0)
    x, outgoing = (torch.randn(24, 1, HIDDEN, generator=generator) for _ in range(2))

    ours_in = x.clone().requires_grad_()
    ours, _ = model.chunks[0].decoder.layers[0].mlp(ours_in)
    ours.backward(outgoing)
    gradients = WeightSource(model, layout, value=lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
    specs = [spec for spec in gradients.specs() if ".mlp." in spec.name]
    got = {spec.name: value for spec, value in zip(specs, gradients.gather(specs), strict=True)}

    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    block = oracle.model.layers[0].mlp
    exact_in = x.double().transpose(0, 1).requires_grad_()  # [B, S, H] there
    exact = block(exact_in)
    exact.backward(outgoing.double().transpose(0, 1))
    expected = {"gate.weight": block.gate.weight.grad}
    for e in range(EXPERTS):
        gate, up = block.experts.gate_up_proj.grad[e].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": block.experts.down_proj.grad[e]}
        expected |= {f"experts.{e}.{part}.weight": value for part, value in parts.items()}

    assert len(got) == len(expected) == 1 + 3 * EXPERTS
    pairs = {"output": (ours[:, 0], exact[0]), "input": (ours_in.grad[:, 0], exact_in.grad[0])}
    pairs |= {name: (got[f"model.layers.0.mlp.{name}"], value) for name, value in expected.items()}
    for name, (value, reference) in pairs.items():
        # sums of some tens of float32 products, rounded to 6e-8 each, and a softmax
        assert (value.double() - reference).abs().max() <= 2e-6 * reference.abs().max() + 1e-7, name
