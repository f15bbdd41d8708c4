"""Fusions on a GPU change no gradient: SwiGLU, and weight gradients accumulated
by their products."""

import pytest
import torch
from torch import Tensor

from megatron_dapo.training import policy
from megatron_dapo.training.policy import Policy
from tests.tiny_models import make_tiny
from tests.training_checks import MANY_MICRO_BATCHES, MEGATRON, policy_and_mini_batches

from megatron.core.tensor_parallel import RowParallelLinear  # isort: skip

pytestmark = pytest.mark.unit


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def model_path(request, tmp_path) -> str:
    return str(make_tiny(tmp_path / "tiny", request.param, layers=2, hidden=16, heads=2))


def gradients(made: Policy, mini_batches: list) -> dict[str, Tensor]:
    made.accumulate_gradients(mini_batches[0])
    (stage,) = made.state.stages
    return {name: parameter.main_grad.clone() for name, parameter in stage.named_parameters()}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys() and any(gradient.any() for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_the_fused_activation_gives_the_same_gradients(layout, model_path):
    made, mini_batches = policy_and_mini_batches(layout, model_path, [MANY_MICRO_BATCHES])
    plain = gradients(made, mini_batches)
    for module in made.model.chunks[0].modules():
        if hasattr(module, "config"):
            module.config.bias_activation_fusion = True
    assert_equal(gradients(made, mini_batches), plain)


class Product(torch.autograd.Function):
    """x W^T by the contract of Transformer Engine 2.20's Linear with fuse_wgrad_accumulation
    (module/linear.py). The weight's gradient goes to its main_grad, autograd gets an unreadable
    one, the parameter is marked."""

    num_fused = 0

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, fuses: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.fuses = weight, fuses
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        if ctx.fuses:
            weight.main_grad.add_(grad_weight)
            weight.grad_added_to_main_grad = True
            grad_weight = torch.full_like(weight, torch.nan)
            Product.num_fused += 1
        return grad @ weight, grad_weight, None


class StandIn(RowParallelLinear):
    fuse_wgrad_accumulation = False

    def forward(self, x: Tensor):
        return Product.apply(x, self.weight, self.fuse_wgrad_accumulation), None


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_products_that_accumulate_weight_gradients_are_asked_to_and_nothing_is_added_twice(
    layout, tmp_path, overlap, monkeypatch
):
    path = str(make_tiny(tmp_path / "tiny", "qwen3", layers=2, hidden=16, heads=2))
    settings = [MANY_MICRO_BATCHES, f"{MEGATRON}.overlap_grad_reduce={overlap}"]
    expected = gradients(*policy_and_mini_batches(layout, path, settings))
    build = policy.build_model

    def with_stand_ins(*arguments, **options):
        model = build(*arguments, **options)
        for module in model.chunks[0].modules():
            if isinstance(module, RowParallelLinear):
                module.__class__ = StandIn
        return model

    monkeypatch.setattr(policy, "build_model", with_stand_ins)
    monkeypatch.setattr(Product, "num_fused", 0)
    made, mini_batches = policy_and_mini_batches(layout, path, settings)
    got = gradients(made, mini_batches)
    assert Product.num_fused == 2 * 2 * len(mini_batches[0]) > 4
    assert_equal(got, expected)
    assert_equal(gradients(made, mini_batches), expected)  # and again: the mark is gone
