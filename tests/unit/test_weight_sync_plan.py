"""The pure parts of weight sync: the plan, and the right checksum of a server."""

import hashlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.common.sizes import MIB
from megatron_dapo.huggingface.model_tensors import ServedTensor, served_tensors
from megatron_dapo.huggingface.spec_reader import model_spec
from megatron_dapo.models.safetensors_files import TensorSpec
from megatron_dapo.weight_sync.broadcast_group import address_towards
from megatron_dapo.weight_sync.buckets import num_bytes, plan_buckets, plan_for
from megatron_dapo.weight_sync.checksum import (
    accepted_tensors,
    checksum,
    gpu_checksum,
    server_parameters,
    server_tensor,
)
from tests.model_json import MODEL_JSON

pytestmark = pytest.mark.unit


@st.composite
def spec_lists(draw) -> list[TensorSpec]:
    shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8])
    rows = draw(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=30))
    return [TensorSpec(f"tensor.{i}", shape, dtype) for i, (shape, dtype) in enumerate(rows)]


# --------------------------------------------------------------------------------------------- plan


@given(spec_lists(), st.integers(1, 20_000), st.integers(0, 20_000))
def test_every_tensor_travels_once_in_a_bucket_that_holds_it(specs, bucket_bytes, flat_bytes):
    plan = plan_buckets(specs, bucket_bytes, flat_bytes)
    assert sorted(plan.names) == sorted(spec.name for spec in specs)
    assert plan.num_bytes == sum(num_bytes(spec) for spec in specs)
    for bucket in plan.buckets:
        assert bucket.specs
        assert bucket.num_bytes <= bucket_bytes or len(bucket.specs) == 1
        if bucket.flat:
            assert all(num_bytes(spec) <= flat_bytes for spec in bucket.specs)


@given(spec_lists(), st.integers(1, 20_000))
def test_a_server_can_cut_every_flat_bucket_at_aligned_offsets(specs, bucket_bytes):
    for bucket in plan_buckets(specs, bucket_bytes, bucket_bytes).buckets:
        offset = 0
        for spec in bucket.specs:
            assert not bucket.flat or offset % spec.dtype.itemsize == 0
            offset += num_bytes(spec)


@given(spec_lists(), st.integers(1, 20_000), st.integers(0, 20_000))
def test_tensors_of_one_kind_keep_their_order_and_equal_lists_give_equal_digests(specs, bucket_bytes, flat_bytes):
    plan = plan_buckets(specs, bucket_bytes, flat_bytes)
    for flat in (True, False):
        for dtype in {spec.dtype for spec in specs}:
            sent = [s for b in plan.buckets if b.flat == flat for s in b.specs if s.dtype == dtype]
            assert sent == [spec for spec in specs if spec in set(sent)]
    assert plan_buckets(list(specs), bucket_bytes, flat_bytes).digest() == plan.digest()


@given(spec_lists(), st.data())
def test_the_digest_sees_any_difference(specs, data):
    digest = plan_buckets(specs, 10_000, 5_000).digest()
    at = data.draw(st.integers(0, len(specs) - 1))
    old = specs[at]
    other = data.draw(
        st.sampled_from(
            [
                TensorSpec(old.name + "x", old.shape, old.dtype),
                TensorSpec(old.name, (*old.shape, 2), old.dtype),
                TensorSpec(old.name, old.shape, torch.float16),
            ]
        )
    )
    assert plan_buckets([*specs[:at], other, *specs[at + 1 :]], 10_000, 5_000).digest() != digest


def test_on_cpu_large_tensors_are_not_copied_into_flat_buckets_and_no_flat_bucket_exceeds_64_mib():
    specs = [TensorSpec(f"small.{i}", (256, 1024), torch.float32) for i in range(100)]  # 1 MiB each
    specs.append(TensorSpec("large", (257, 1024), torch.float32))
    plan = plan_for(torch.device("cpu"), specs, bucket_size_mb=256)
    assert [(b.flat, len(b.specs)) for b in plan.buckets] == [(True, 64), (True, 36), (False, 1)]
    assert plan.flat_bytes == 64 * MIB
    on_gpu = plan_for(torch.device("cuda"), specs, bucket_size_mb=256)
    assert [(b.flat, len(b.specs)) for b in on_gpu.buckets] == [(True, 101)]


def test_tensors_that_go_together_count_as_one_tensor():
    first, second = (TensorSpec(name, (600,), torch.float32) for name in "ab")  # 2400 bytes each
    pair = [first, replace(second, with_previous=True)]
    other = TensorSpec("c", (600,), torch.float32)
    for specs, size, flat_limit, expected in (
        ([other, *pair], 4800, 4800, [(True, ["c"]), (True, ["a", "b"])]),
        ([*pair, other], 7200, 7200, [(True, ["a", "b", "c"])]),
        ([*pair, other], 7200, 2400, [(True, ["c"]), (False, ["a", "b"])]),
        ([*pair, other], 2400, 2400, [(True, ["c"]), (False, ["a", "b"])]),
    ):
        buckets = plan_buckets(specs, size, flat_limit).buckets
        assert [(bucket.flat, bucket.names) for bucket in buckets] == expected


# ---------------------------------------------------------------------------------------- checksums


def layer(heads: int, kv_heads: int, width: int = 6, ffn: int = 16) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (heads * 4, width),
        "self_attn.k_proj": (kv_heads * 4, width),
        "self_attn.v_proj": (kv_heads * 4, width),
        "self_attn.o_proj": (width, heads * 4),
        "mlp.gate_proj": (ffn, width),
        "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
        "input_layernorm": (width,),
    }
    return {f"model.layers.0.{module}.weight": torch.randn(shape) for module, shape in shapes.items()}


SMALL = MODEL_JSON | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
GLM4 = SMALL | {"architectures": ["Glm4ForCausalLM"], "intermediate_size": 4}
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
QWEN3_MOE = SMALL | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"]}
GLM4_MOE = SMALL | EXPERTS | {"architectures": ["Glm4MoeForCausalLM"]}
DEEPSEEK = QWEN3_MOE | {
    "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "q_lora_rank": 3,
    "kv_lora_rank": 4, "qk_nope_head_dim": 1, "qk_rope_head_dim": 2, "v_head_dim": 2,
}  # fmt: skip
QWEN3_5 = SMALL | {
    "architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 3, "linear_value_head_dim": 2, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GPT_OSS = SMALL | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
GPT_OSS |= {"rope_parameters": YARN, "intermediate_size": 4}


def as_specs(tensors: dict[str, torch.Tensor], model: dict | None = None) -> list[TensorSpec]:
    """As a trainer of this model sends them."""
    served = served_tensors(model_spec(model or SMALL))
    assert tensors.keys() <= served.keys()
    return [
        TensorSpec(name, tuple(tensor.shape), tensor.dtype, served=served[name]) for name, tensor in tensors.items()
    ]


def held(tensors: dict[str, torch.Tensor], name: str, rank: int, size: int, model: dict | None = None) -> torch.Tensor:
    parts = server_parameters(as_specs(tensors, model))[name]
    return server_tensor(parts, [tensors[part.name] for part in parts], rank, size)


def test_fused_parameters_are_stacked_in_the_servers_order_for_any_input_order():
    tensors = layer(heads=4, kv_heads=2)
    p = "model.layers.0."
    backwards = dict(reversed(tensors.items()))
    for given_order in (tensors, backwards):
        assert set(server_parameters(as_specs(given_order))) == {
            p + "self_attn.qkv_proj.weight",
            p + "self_attn.o_proj.weight",
            p + "mlp.gate_up_proj.weight",
            p + "mlp.down_proj.weight",
            p + "input_layernorm.weight",
        }
        qkv = torch.cat([tensors[f"{p}self_attn.{x}_proj.weight"] for x in "qkv"])
        assert torch.equal(held(given_order, p + "self_attn.qkv_proj.weight", 0, 1), qkv)


def test_server_ranks_hold_slices_that_make_up_the_whole():
    tensors = layer(heads=4, kv_heads=2)
    p = "model.layers.0."
    halves = [held(tensors, p + "self_attn.qkv_proj.weight", rank, 2) for rank in (0, 1)]
    q, k, v = (tensors[f"{p}self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(halves[0], torch.cat([q[:8], k[:4], v[:4]]))
    assert torch.equal(halves[1], torch.cat([q[8:], k[4:], v[4:]]))
    down = torch.cat([held(tensors, p + "mlp.down_proj.weight", rank, 2) for rank in (0, 1)], dim=1)
    assert torch.equal(down, tensors[p + "mlp.down_proj.weight"])
    assert held(tensors, p + "input_layernorm.weight", 1, 2).shape == (6,)


def test_gate_and_up_that_come_in_one_tensor_are_cut_each():
    """As those of GLM-4."""
    name, whole = "model.layers.0.mlp.gate_up_proj.weight", torch.randn(8, 3)
    assert torch.equal(held({name: whole}, name, 1, 2, GLM4), whole[[2, 3, 6, 7]])
    assert torch.equal(held({name: whole}, name, 0, 1, GLM4), whole)


def test_tensors_of_other_heights_that_come_in_one_are_cut_each_and_few_heads_are_repeated():
    """Four heads of queries, one of keys and one of values, of two rows each."""
    whole = torch.randn(12, 3)
    served = ServedTensor("qkv", cut=0, blocks=(8, 2, 2), unit=2)
    spec = TensorSpec("qkv", (12, 3), whole.dtype, served=served)
    for size, rank, rows in ((2, 1, [4, 5, 6, 7, 8, 9, 10, 11]), (4, 1, [2, 3, 8, 9, 10, 11])):
        assert torch.equal(server_tensor([spec], [whole], rank, size), whole[rows])


def test_a_vocabulary_may_lie_whole_on_every_rank_of_a_server():
    name, table = "model.embed_tokens.weight", torch.randn(65, 3)
    cut, whole = accepted_tensors(as_specs({name: table}), [table], 1, 2)
    assert torch.equal(cut, torch.cat([table[64:], torch.zeros(63, 3)])) and torch.equal(whole, table)
    (norm,) = accepted_tensors(as_specs({"model.norm.weight": table[0]}), [table[0]], 1, 2)
    assert torch.equal(norm, table[0])


def test_experts_are_stacked_in_their_order_and_cut_within_each_on_the_server():
    # as ranks with some of them each give them
    p, order = "model.layers.0.mlp.experts.", (1, 10, 0, *range(2, 10), 11)
    shapes = {"down_proj": (6, 8), "up_proj": (8, 6), "gate_proj": (8, 6)}
    tensors = {f"{p}{e}.{m}.weight": torch.randn(shape) for e in order for m, shape in shapes.items()}
    tensors["model.layers.0.mlp.gate.weight"] = torch.randn(12, 6)
    names = set(server_parameters(as_specs(tensors, QWEN3_MOE)))
    assert names == {f"{p}w13_weight", f"{p}w2_weight", "model.layers.0.mlp.gate.weight"}
    gate, up, down = (
        torch.stack([tensors[f"{p}{e}.{m}_proj.weight"] for e in range(12)]) for m in ("gate", "up", "down")
    )
    for rank, rows in ((0, slice(0, 4)), (1, slice(4, 8))):
        w13, w2 = torch.cat([gate[:, rows], up[:, rows]], dim=1), down[:, :, rows]
        assert checksum(held(tensors, f"{p}w13_weight", rank, 2, QWEN3_MOE)) == checksum(w13)
        assert checksum(held(tensors, f"{p}w2_weight", rank, 2, QWEN3_MOE)) == checksum(w2)


def test_shared_experts_are_stacked_as_an_mlp_is_and_a_router_with_a_bias_is_in_float32():
    p = "model.layers.1.mlp."
    tensors = {
        f"{p}shared_experts.{m}.weight": torch.randn(shape)
        for m, shape in {"down_proj": (6, 8), "up_proj": (8, 6), "gate_proj": (8, 6)}.items()
    }
    tensors[f"{p}gate.weight"] = torch.randn(12, 6).bfloat16()
    tensors[f"{p}gate.e_score_correction_bias"] = torch.randn(12)
    gate, up = (tensors[f"{p}shared_experts.{m}.weight"] for m in ("gate_proj", "up_proj"))
    stacked = held(tensors, f"{p}shared_experts.gate_up_proj.weight", 1, 2, GLM4_MOE)
    assert torch.equal(stacked, torch.cat([gate[4:], up[4:]]))
    assert torch.equal(held(tensors, f"{p}gate.weight", 1, 2, GLM4_MOE), tensors[f"{p}gate.weight"].float())
    assert held(tensors, f"{p}gate.weight", 1, 2, GLM4_MOE).dtype == torch.float32
    assert torch.equal(
        held(tensors, f"{p}gate.e_score_correction_bias", 1, 2, GLM4_MOE), tensors[f"{p}gate.e_score_correction_bias"]
    )


def test_a_latent_attention_has_its_first_products_in_one_and_the_others_cut_by_heads():
    """And the weight of the router beside it in the model's type,
    as SGLang's DeepSeek-V3 has it."""
    p, shapes = "model.layers.1.self_attn.", {"q_a_proj": (3, 6), "q_b_proj": (8, 3), "kv_a_proj_with_mqa": (5, 6)}
    shapes |= {"kv_b_proj": (12, 4), "o_proj": (6, 8)}
    tensors = {f"{p}{module}.weight": torch.randn(shape) for module, shape in shapes.items()}
    down = torch.cat([tensors[f"{p}q_a_proj.weight"], tensors[f"{p}kv_a_proj_with_mqa.weight"]])
    assert torch.equal(held(tensors, f"{p}fused_qkv_a_proj_with_mqa.weight", 1, 2, DEEPSEEK), down)
    for module, part in (("q_b_proj", slice(4, 8)), ("kv_b_proj", slice(6, 12))):
        assert torch.equal(held(tensors, f"{p}{module}.weight", 1, 2, DEEPSEEK), tensors[f"{p}{module}.weight"][part])
    gate = {"model.layers.1.mlp.gate.weight": torch.randn(12, 6).bfloat16()}
    bias = {"model.layers.1.mlp.gate.e_score_correction_bias": torch.randn(12)}
    assert held(tensors | gate | bias, "model.layers.1.mlp.gate.weight", 0, 1, DEEPSEEK).dtype == torch.bfloat16
    whole_queries = {f"{p}q_proj.weight": torch.randn(8, 6)} | {
        name: tensor for name, tensor in tensors.items() if "q_" not in name.removeprefix(p)
    }
    model = DEEPSEEK | {"q_lora_rank": None}
    assert torch.equal(held(whole_queries, f"{p}q_proj.weight", 1, 2, model), whole_queries[f"{p}q_proj.weight"][4:])
    keys = f"{p}kv_a_proj_with_mqa.weight"
    assert torch.equal(held(whole_queries, keys, 1, 2, model), tensors[keys])


def test_experts_that_come_in_one_tensor_are_transposed_and_cut_and_their_biases_are_in_float32():
    """As gpt-oss has them: [experts, in, out], the rows of gate and up in turn."""
    p = "model.layers.0.mlp.experts."
    shapes = {"gate_up_proj": (3, 5, 8), "gate_up_proj_bias": (3, 8), "down_proj": (3, 4, 5), "down_proj_bias": (3, 5)}
    tensors = {f"{p}{name}": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    names = {"w13_weight", "w13_weight_bias", "w2_weight", "w2_weight_bias"}
    assert set(server_parameters(as_specs(tensors, GPT_OSS))) == {f"{p}{name}" for name in names}
    gate_up, gate_up_bias, down, down_bias = tensors.values()
    for rank, outs, ins in ((0, slice(0, 4), slice(0, 2)), (1, slice(4, 8), slice(2, 4))):
        expected = {
            "w13_weight": torch.stack([gate_up[e].T[outs] for e in range(3)]),
            "w13_weight_bias": gate_up_bias[:, outs].float(),
            "w2_weight": torch.stack([down[e].T[:, ins] for e in range(3)]),
            "w2_weight_bias": down_bias.float() if rank == 0 else torch.zeros(3, 5),
        }
        for name, tensor in expected.items():
            assert checksum(held(tensors, f"{p}{name}", rank, 2, GPT_OSS)) == checksum(tensor), name
    assert torch.equal(held(tensors, f"{p}w13_weight", 0, 1, GPT_OSS), gate_up.mT)


def test_attention_sinks_are_cut_by_heads_and_in_bfloat16_or_float32():
    name, sinks = "model.layers.0.self_attn.sinks", torch.randn(4)
    (parts,) = server_parameters(as_specs({name: sinks}, GPT_OSS)).values()
    rounded, kept = accepted_tensors(parts, [sinks], 1, 2)
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, sinks[2:].bfloat16())
    assert kept.dtype == torch.float32 and torch.equal(kept, sinks[2:])


def test_more_server_ranks_than_key_value_heads_share_them():
    tensors = layer(heads=4, kv_heads=2)
    k = tensors["model.layers.0.self_attn.k_proj.weight"]
    for rank, rows in ((0, k[:4]), (1, k[:4]), (2, k[4:]), (3, k[4:])):
        assert torch.equal(held(tensors, "model.layers.0.self_attn.qkv_proj.weight", rank, 4)[4:8], rows)


@pytest.mark.parametrize(("vocab", "tp", "rows"), [(64, 1, 64), (65, 1, 128), (65, 2, 64), (65, 3, 64), (100, 3, 64)])
def test_the_vocabulary_is_padded_with_zeros_as_sglang_does(vocab, tp, rows):
    tensors = {"lm_head.weight": torch.randn(vocab, 3)}
    slices = [held(tensors, "lm_head.weight", rank, tp) for rank in range(tp)]
    assert {part.shape[0] for part in slices} == {rows}
    whole = torch.cat(slices)
    assert torch.equal(whole[:vocab], tensors["lm_head.weight"]) and not whole[vocab:].any()


def test_the_cpu_checksum_is_the_start_of_sha256_of_the_bytes():
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(5, 7).to(dtype)
        data = bytes(tensor.view(torch.uint8).flatten().tolist())
        assert checksum(tensor) == hashlib.sha256(data).hexdigest()[:16]
        assert checksum(tensor.T) != checksum(tensor)


@given(st.integers(0, 20_000), st.integers(0, 2**31))
def test_the_gpu_checksum_is_that_of_a_word_by_word_reading_of_sglangs_kernel(num_bytes_, seed):
    data = torch.randint(0, 256, (num_bytes_,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    assert gpu_checksum(data) == f"{kernel_in_numpy(data.numpy().tobytes()):016x}"


def kernel_in_numpy(data: bytes) -> int:
    """sglang.kernels.ops.memory.gpu_tensor_hash, read line by line in 32-bit numpy arithmetic,
    tile by tile."""
    import numpy as np

    def fmix32(x):
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x85EBCA6B)
        x = x ^ (x >> np.uint32(13))
        x = x * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    def rotl32(x, r):
        return (x << np.uint32(r)) | (x >> np.uint32(32 - r))

    if not data:
        return 0
    words = np.frombuffer(data + b"\0" * (-len(data) % 4), dtype=np.uint32)
    seed = 0x243F6A88
    s1, s2 = np.uint32(seed), np.uint32(((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
    total = 0
    with np.errstate(over="ignore"):
        for base in range(0, len(words), 8192):
            v = words[base : base + 8192]
            iu = np.arange(base, base + len(v), dtype=np.uint32)
            halves = []
            for position, s, rotation in ((0x27D4EB2D, s1, 15), (0x165667B1, s2, 13)):
                k = fmix32(v ^ ((iu * np.uint32(position) + s) ^ rotl32(iu, rotation)))
                h = np.array([k.sum(dtype=np.uint32) ^ np.uint32(len(words) * 4)], dtype=np.uint32)
                halves.append(int(fmix32(h)[0]))
            total += (halves[0] << 32) | halves[1]
    x = total & (2**64 - 1)
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)


# ---------------------------------------------------------------------------------------- addresses


def test_the_group_meets_on_loopback_when_all_servers_are_there():
    assert address_towards(["http://127.0.0.1:30000", "http://localhost:30001"]) == "127.0.0.1"


def test_a_delta_net_is_cut_by_heads_in_each_of_its_parts():
    """SGLang's module has q, k, v and z of a rank one below the other, and b and a."""
    p = "model.layers.0.linear_attn."
    rows = {"in_proj_qkv": 6 + 6 + 8, "in_proj_z": 8, "in_proj_b": 4, "in_proj_a": 4}
    tensors = {f"{p}{name}.weight": torch.randn(number, 5) for name, number in rows.items()}
    tensors |= {f"{p}conv1d.weight": torch.randn(20, 1, 4), f"{p}A_log": torch.randn(4)}
    q, k, v = tensors[f"{p}in_proj_qkv.weight"].split([6, 6, 8])
    z, b, a = (tensors[f"{p}in_proj_{name}.weight"] for name in "zba")
    second = {
        "in_proj_qkvz.weight": torch.cat([q[3:], k[3:], v[4:], z[4:]]),
        "in_proj_ba.weight": torch.cat([b[2:], a[2:]]),
        "conv1d.weight": tensors[f"{p}conv1d.weight"][[*range(3, 6), *range(9, 12), *range(16, 20)]],
        "A_log": tensors[f"{p}A_log"][2:],
    }
    assert set(server_parameters(as_specs(tensors, QWEN3_5))) == {p + name for name in second}
    for name, part in second.items():
        assert torch.equal(held(tensors, p + name, 1, 2, QWEN3_5), part), name


def test_attention_of_a_hybrid_is_served_by_the_layer_itself():
    """A head's query and gate stay together; more ranks than key heads repeat these."""
    p = "model.layers.1."
    rows = {"q": 4 * 8, "k": 2 * 4, "v": 2 * 4}
    tensors = {f"{p}self_attn.{name}_proj.weight": torch.randn(number, 5) for name, number in rows.items()}
    q, k, v = tensors.values()
    assert torch.equal(held(tensors, f"{p}qkv_proj.weight", 3, 4, QWEN3_5), torch.cat([q[24:], k[4:], v[4:]]))
