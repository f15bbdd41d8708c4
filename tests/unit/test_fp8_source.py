"""What a trainer sends to servers with FP8 weights: names, buckets, the servers' form, errors."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dapo.huggingface.fp8_form import quantization_config
from megatron_dapo.huggingface.model_tensors import hf_tensors
from megatron_dapo.huggingface.spec_reader import model_spec
from megatron_dapo.models.safetensors_files import TensorSpec
from megatron_dapo.weight_sync.buckets import num_bytes, plan_buckets, plan_for
from megatron_dapo.weight_sync.checksum import checksum, server_parameters, server_tensor
from megatron_dapo.weight_sync.fp8_source import Fp8Source, relative_error
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError
from tests import fp8_oracle
from tests.unit.test_weight_sync_plan import DEEPSEEK, GLM4_MOE, GPT_OSS, QWEN3_5, QWEN3_MOE, as_specs, held

pytestmark = pytest.mark.unit

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
WIDE = {
    "hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 64, "num_experts": 2, "num_hidden_layers": 1,
}  # fmt: skip
MIXTURE = QWEN3_MOE | WIDE
HYBRID = QWEN3_5 | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "norm_topk_prob": True, "hidden_size": 128,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 64,
}  # fmt: skip
NEXT = HYBRID | {"architectures": ["Qwen3NextForCausalLM"]}


@dataclass
class Weights:
    """A source of one rank."""

    tensors: dict[str, Tensor]
    model: dict
    is_source: bool = True
    asked: list[list[str]] = field(default_factory=list)

    def specs(self) -> list[TensorSpec]:
        return as_specs(self.tensors, self.model)

    def gather(self, specs: list[TensorSpec]) -> list[Tensor] | None:
        self.asked.append([spec.name for spec in specs])
        return [self.tensors[spec.name] for spec in specs] if self.is_source else None


def weights_of(model: dict, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = hf_tensors(model_spec(model))
    return {name: torch.randn(shape, generator=generator).to(dtype) * 0.05 for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (QWEN3_MOE, ATTENTION | MLP),
        (GLM4_MOE, ATTENTION | MLP),
        (DEEPSEEK, LATENT | MLP),
        (HYBRID, ATTENTION | MLP | {"in_proj_qkv", "in_proj_z", "out_proj"}),
        (NEXT, ATTENTION | MLP | {"in_proj_qkvz", "out_proj"}),
        (GPT_OSS, ATTENTION),  # its experts are stacks: such servers are refused
    ],
)
def test_the_products_of_attention_mlps_and_experts_are_sent_in_blocks_and_nothing_else(model, expected):
    tensors = {name: torch.zeros(shape) for name, shape in hf_tensors(model_spec(model)).items()}
    sent = {spec.name: spec for spec in Fp8Source(Weights(tensors, model)).specs()}
    in_blocks = {name for name in tensors if sent[name].dtype == torch.float8_e4m3fn}
    assert {name.split(".")[-2] for name in in_blocks} == expected
    assert in_blocks == {name for name in tensors if name.endswith(".weight") and name.split(".")[-2] in expected}
    assert sent.keys() - tensors.keys() == {f"{name}_scale_inv" for name in in_blocks}
    for name in in_blocks:
        rows, columns = tensors[name].shape
        scale = sent[f"{name}_scale_inv"]
        assert scale.shape == (math.ceil(rows / 128), math.ceil(columns / 128)) and scale.dtype == torch.float32


def test_a_server_is_told_of_the_blocks_and_of_products_that_have_none():
    config = quantization_config(model_spec(QWEN3_MOE))
    assert config == {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                    "weight_block_size": [128, 128]}  # fmt: skip
    assert quantization_config(model_spec(HYBRID)) == config | {"modules_to_not_convert": ["in_proj_b", "in_proj_a"]}
    assert quantization_config(model_spec(NEXT)) == config | {"modules_to_not_convert": ["in_proj_ba"]}


def test_whole_tensors_are_gathered_once_for_blocks_and_scales_in_the_order_asked_for():
    source = Weights(weights_of(MIXTURE), MIXTURE)
    blocks = Fp8Source(source)
    by_name = {spec.name: spec for spec in blocks.specs()}
    norm, gate = "model.norm.weight", "model.layers.0.mlp.experts.1.gate_proj.weight"
    got = blocks.gather([by_name[f"{gate}_scale_inv"], by_name[norm], by_name[gate]])
    assert source.asked == [[gate, norm]]
    expected, scales = fp8_oracle.quantized(source.tensors[gate].float().numpy())
    assert np.array_equal(got[0].numpy(), scales) and got[1] is source.tensors[norm]
    assert np.array_equal(got[2].view(torch.uint8).numpy(), expected)


def test_a_rank_that_only_helps_to_gather_quantizes_nothing():
    source = Weights(weights_of(MIXTURE), MIXTURE, is_source=False)
    blocks = Fp8Source(source)
    assert blocks.gather(blocks.specs()) is None and blocks.sums() == (0.0, 0.0)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_named_after_all_were_gathered(number):
    name = "model.layers.0.self_attn.o_proj.weight"
    source = Weights(weights_of(MIXTURE), MIXTURE)
    source.tensors[name][3, 5] = number
    blocks = Fp8Source(source)
    with pytest.raises(WeightSyncError, match=f"{name} holds NaN or infinity"):
        blocks.gather(blocks.specs())
    assert len(source.asked) == 1


def test_the_error_of_a_push_is_that_of_all_blocks_on_all_ranks_and_of_the_last_push():
    source = Weights(weights_of(MIXTURE), MIXTURE)
    blocks = Fp8Source(source)
    names = [name for name in source.tensors if name.split(".")[-2] in ATTENTION | MLP]
    for factor in (1.0, 3.0):
        for name in names:
            source.tensors[name] = (source.tensors[name].float() * factor + 0.01).bfloat16()
        for bucket in plan_buckets(blocks.specs(), 100_000, 100_000).buckets:
            blocks.gather(list(bucket.specs))
        blocks.gather(blocks.specs()[:40])  # a comparison after the push
        exact = [source.tensors[name].double().numpy() for name in names]
        served = [fp8_oracle.through_blocks(weight.astype(np.float32)).astype(np.float64) for weight in exact]
        error = sum(np.square(a - b).sum() for a, b in zip(exact, served, strict=True))
        total = sum(np.square(weight).sum() for weight in exact)
        assert blocks.sums() == pytest.approx((error, total), rel=1e-5)
        assert relative_error([(0.0, 0.0), blocks.sums()]) == pytest.approx(math.sqrt(error / total), rel=1e-5)
    assert relative_error([(0.0, 0.0)] * 2) is None


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("model", [MIXTURE, DEEPSEEK | {"q_lora_rank": 128, "hidden_size": 1024}])
def test_blocks_travel_with_their_scales_in_flat_buckets_however_large(kind, model):
    """gloo sends no float8; SGLang cuts a flat bucket at multiples of a number's size."""
    tensors = {name: torch.empty(shape, device="meta") for name, shape in hf_tensors(model_spec(model)).items()}
    large = "model.layers.0.self_attn.o_proj.weight"
    specs = [replace(spec, shape=(8192, 1024)) if spec.name == large else spec for spec in as_specs(tensors, model)]
    source = Weights(tensors, model)
    source.specs = lambda: specs  # type: ignore[method-assign]
    plan = plan_for(torch.device(kind), Fp8Source(source).specs(), bucket_size_mb=4)
    place = {spec.name: number for number, bucket in enumerate(plan.buckets) for spec in bucket.specs}
    for number, bucket in enumerate(plan.buckets):
        offset = 0
        for spec in bucket.specs:
            if spec.dtype == torch.float8_e4m3fn:
                assert bucket.flat and place[f"{spec.name}_scale_inv"] == number
            assert not bucket.flat or offset % spec.dtype.itemsize == 0
            offset += num_bytes(spec)
    assert plan.flat_bytes >= 8192 * 1024
    if model is not MIXTURE:  # a server drops one of these without the other
        a, b = (place[f"model.layers.0.self_attn.{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa"))
        assert a == b


@pytest.mark.parametrize(
    ("model", "tp"), [(MIXTURE, 1), (MIXTURE, 2), (HYBRID, 1), (HYBRID, 2), (NEXT, 2)], ids=lambda value: str(value)[:9]
)
def test_a_servers_checksums_are_those_of_the_weights_that_its_cut_blocks_stand_for(model, tp):
    """SGLang makes them of bfloat16 numbers. Expected: whole weights through blocks, then cut."""
    source = Weights(weights_of(model), model)
    blocks = Fp8Source(source)
    sent = dict(zip([spec.name for spec in blocks.specs()], blocks.gather(blocks.specs()) or [], strict=True))
    through = {
        name: torch.from_numpy(fp8_oracle.through_blocks(tensor.float().numpy())).bfloat16()
        if f"{name}_scale_inv" in sent
        else tensor
        for name, tensor in source.tensors.items()
    }
    parameters = server_parameters(blocks.specs())
    assert parameters.keys() == server_parameters(source.specs()).keys()
    for name, specs in parameters.items():
        tensors = [sent[spec.name] for spec in specs]
        for rank in range(tp):
            got = checksum(server_tensor(specs, tensors, rank, tp))
            assert got == checksum(held(through, name, rank, tp, model)), (name, rank)
