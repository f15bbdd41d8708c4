"""The weights on a server's GPU, in bfloat16 and in FP8 blocks, against counts by hand."""

import re
from dataclasses import replace
from math import ceil, prod
from pathlib import Path

import pytest

from megatron_dapo.__main__ import main
from megatron_dapo.commands.plan.server_time import ServerLayout, active_parameters, push_s, server_speed
from megatron_dapo.commands.plan.training_time import Efficiency
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.model_shapes import MODEL_SHAPES
from megatron_dapo.estimates.server_memory import server_memory
from megatron_dapo.estimates.server_weights import fills_blocks, weight_bytes
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import hf_tensors
from megatron_dapo.huggingface.spec_reader import model_spec
from tests.unit.test_hf_config import DEEPSEEK_V3
from tests.unit.test_plan_time import HALF, SLOW, SMALL

pytestmark = pytest.mark.unit

ROLLOUT = "actor_rollout_ref.rollout"
ROOT = Path(__file__).parents[2]


def spec_of(name: str) -> ModelSpec:
    return model_spec(MODEL_SHAPES[name])


def in_bytes(*shapes: tuple[int, int]) -> int:
    """Return the bytes of matrices in bfloat16."""
    return 2 * sum(map(prod, shapes))


def in_blocks(*shapes: tuple[int, int]) -> int:
    """Return the bytes of matrices in blocks of 128 x 128 with a scale of 4 bytes."""
    return sum(n * k + 4 * ceil(n / 128) * ceil(k / 128) for n, k in shapes)


@pytest.mark.parametrize(("tp", "form"), [(32, in_bytes), (16, in_blocks)])
def test_a_gpu_of_deepseek_v3_has_its_heads_and_columns_and_the_rest_whole(tp, form):
    """By its published config.json: 61 layers, 3 of them dense; latent vectors of 1536 and 512 + 64."""
    whole = form((1536, 7168), (576, 7168))
    cut = form((128 * 192, 1536), (128 * 256, 512), (7168, 128 * 128))
    dense = form((18432, 7168), (18432, 7168), (7168, 18432))
    expert = form((2048, 7168), (2048, 7168), (7168, 2048))  # 256 of them, and a shared one
    router = 2 * (256 * 7168 + 256)
    norms = 2 * (61 * (2 * 7168 + 1536 + 512) + 7168)
    vocabulary = 2 * 2 * 129280 * 7168
    total = 61 * whole + norms + 58 * router + (61 * cut + 3 * dense + 58 * 257 * expert + vocabulary) / tp
    assert weight_bytes(model_spec(DEEPSEEK_V3), 2, tp, in_blocks=form is in_blocks) == total


@pytest.mark.parametrize(("tp", "kv_heads"), [(4, 2), (16, 1)])
def test_a_gpu_has_at_least_one_key_value_head_and_a_float32_router_beside_a_bias(tp, kv_heads):
    """GLM-4.5: 96 heads and 8 key-value heads of 128, 3 of 92 layers dense, 160 experts of 1536."""
    heads = 128 * (96 // tp + 2 * kv_heads)
    attention = 2 * heads * (5120 + 1) + 2 * (96 // tp) * 128 * 5120
    norms = 2 * (2 * 5120 + 2 * 128)
    dense = 2 * 3 * 5120 * 12288 // tp
    mixture = 2 * 161 * 3 * 5120 * 1536 // tp + 4 * 160 * 5120 + 2 * 160
    vocabulary = 2 * 2 * 151552 * 5120 // tp + 2 * 5120
    total = 92 * (attention + norms) + 3 * dense + 89 * mixture + vocabulary
    assert weight_bytes(spec_of("glm-4.5"), 2, tp) == total


QUANTIZED = {  # last names of modules
    "qwen3-30b-a3b": r"(q|k|v|o|gate|up|down)_proj",
    "qwen3.5-35b-a3b": r"((q|k|v|o|gate|up|down)_proj|in_proj_qkv|in_proj_z|out_proj)",
    "qwen3-next-80b-a3b": r"((q|k|v|o|gate|up|down)_proj|in_proj_qkvz|out_proj)",
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_of_a_mixture_all_but_embedding_head_norms_routers_and_narrow_products_is_in_blocks(name):
    is_quantized = re.compile(rf"model\.layers\..*\.{QUANTIZED[name]}\.weight")
    spec, total = spec_of(name), 0
    for tensor, shape in hf_tensors(spec).items():
        is_decay = tensor.endswith("A_log")
        total += in_blocks(shape) if is_quantized.fullmatch(tensor) else prod(shape) * (4 if is_decay else 2)
    assert weight_bytes(spec, 2, in_blocks=True) == total
    assert 0.5 < total / weight_bytes(spec, 2) < 0.53


@pytest.mark.parametrize(
    ("name", "tp", "words", "fills"),
    [
        ("qwen3-30b-a3b", 2, "", True),  # experts of 768: 384 is 3 blocks
        ("qwen3-30b-a3b", 4, "", False),  # 192
        ("qwen3-30b-a3b", 4, "--ep-size=4", True),
        ("qwen3-235b-a22b", 4, "", True),  # 1536
        ("qwen3-235b-a22b", 8, "", False),
        ("qwen3-235b-a22b", 8, "--ep-size, '8'", True),
        ("qwen3-235b-a22b", 8, "--ep-size, '2'", True),  # 1536 / 4
        ("qwen3-235b-a22b", 4, "--ep-size, '8'", False),  # more than the GPUs
        ("glm-4.5", 4, "", True),
        ("glm-4.5", 8, "--ep-size, '8'", False),  # a shared expert's 192
        ("glm-4.5-air", 1, "", False),  # a dense layer of 10944
        ("deepseek-v3", 16, "", True),  # 2048
        ("deepseek-v3", 32, "--ep-size, '32'", False),  # a shared expert's 64
        ("gpt-oss-20b", 1, "", False),  # stacks of experts
        ("qwen3-8b", 1, "", False),  # no mixture
    ],
)
def test_a_gpus_part_of_every_product_has_to_consist_of_whole_blocks(name, tp, words, fills):
    config = load_config(None, [f"{ROLLOUT}.server.extra_args=[{words}]"])
    assert fills_blocks(config, spec_of(name), tp) is fills


def test_fp8_leaves_a_server_twice_the_room_for_samples():
    """235B at TP 8: 30 GB in place of 59, of 65.6 on a GPU of 80."""
    spec = spec_of("qwen3-235b-a22b")
    words = ["trainer.gpu_memory_gb=80", f"{ROLLOUT}.server.tensor_model_parallel_size=8"]
    half, blocks = (load_config(None, [*words, f"{ROLLOUT}.quantization={key}"]) for key in ("null", "fp8"))
    plain, small = server_memory(half, spec), server_memory(blocks, spec)
    assert (round(plain.weights / 1e9, 1), round(small.weights / 1e9, 1)) == (59.0, 29.7)
    assert small.kv_cache - plain.kv_cache == plain.weights - small.weights
    assert small.kv_per_token == plain.kv_per_token


def test_a_server_over_nodes_waits_for_the_network_by_hand():
    """The small model on two GPUs of two nodes: a layer has half of query 8 x 8, output 8 x 8 and MLP
    3 x 8 x 16, the one key-value head and the norms: 336 numbers, 936 with half of the vocabulary, of
    2 bytes at 10^4 per second. A token of a request sends 2 layers x 2 x 2 x 1/2 x 8 x 2 = 64 bytes
    at 10^2 per second, inside a node at 10^3."""
    responses = Lengths(median=4, sigma=0.0, longest=8)
    near, far = (server_speed(SMALL, ServerLayout(2, 10, nodes=nodes), responses, 1, SLOW, HALF) for nodes in (1, 2))
    assert near.token_s == pytest.approx(1872 / 1e4 + 4 * 15e-6 + 1e-3)
    assert far.token_s == pytest.approx(1872 / 1e4 + 4 * 65e-6 + 1e-3)
    assert near.token_s_per_request == pytest.approx(96 / 1e4 + 2896 / 2e4 + 64 / 1e3)
    assert far.token_s_per_request == pytest.approx(96 / 1e4 + 2896 / 2e4 + 64 / 1e2)
    assert far.prefill_s == near.prefill_s


@pytest.mark.parametrize(("capability", "factor"), [((9, 0), 2), ((8, 9), 2), ((8, 0), 1), ((10, 0), 1), ((0, 0), 1)])
def test_in_fp8_weights_are_read_as_bytes_and_multiplied_at_its_speed_where_there_is_one(capability, factor):
    spec, responses = spec_of("qwen3-30b-a3b"), Lengths(median=4, sigma=0.0, longest=8)
    gpu = replace(SLOW, capability=capability)
    half, blocks = (
        server_speed(spec, ServerLayout(1, 10, in_blocks=on), responses, 1, gpu, HALF) for on in (False, True)
    )
    saved = weight_bytes(spec, 2) - weight_bytes(spec, 2, in_blocks=True)
    head = 151936 * 2048
    assert half.token_s - blocks.token_s == pytest.approx(saved / 1e4)
    assert blocks.prefill_s == pytest.approx(2 * ((active_parameters(spec) - head) / factor + head) / 1e4)
    pushes = [push_s(spec, 1, 1e9, in_blocks=on) for on in (False, True)]
    assert pushes[0] / pushes[1] == pytest.approx(
        weight_bytes(spec, 2) / weight_bytes(spec, 2, in_blocks=True), rel=1e-3
    )


def test_a_published_server_of_deepseek_r1_in_fp8_is_within_a_quarter():
    """8 H200, SGLang 0.5.7, TP 8, 64 requests of 1024 + 1024 tokens: 34.6 ms per token
    (github.com/SemiAnalysisAI/InferenceX, issue 870)."""
    speed = server_speed(
        model_spec(DEEPSEEK_V3), ServerLayout(8, 64, in_blocks=True), Lengths(1024, 0.0, 1024), 1024,
        HARDWARE["h200"], Efficiency(),
    )  # fmt: skip
    assert 64 / speed.tokens_per_s == pytest.approx(0.0346, rel=0.25)
    assert f"the estimate is\n{64e3 / speed.tokens_per_s:.1f} ms" in (ROOT / "docs" / "plan.md").read_text(
        encoding="utf-8"
    )


def test_servers_over_two_nodes_are_planned_faster_than_published_ones_as_the_page_says():
    """23.1 ms per token of one request on 16 H100 (github.com/tenstorrent/tt-inference-server, issue
    356); 622 tokens/s of 96 on 2 x 8 H800, without CUDA graphs (github.com/sgl-project/sglang, issue
    3361)."""
    spec, gpu, efficiency = model_spec(DEEPSEEK_V3), HARDWARE["h100"], Efficiency()
    layout = ServerLayout(16, 96, nodes=2, in_blocks=True)
    speed = server_speed(spec, layout, Lengths(253, 0.0, 253), 217, gpu, efficiency)
    page = " ".join((ROOT / "docs" / "plan.md").read_text(encoding="utf-8").split())
    read_per_ms = gpu.memory_bandwidth * efficiency.memory / 1e3
    still_ms = 1e3 * speed.token_s - weight_bytes(spec, 2, 16, in_blocks=True) / read_per_ms
    assert f"122 x 65 us + 1 ms = {still_ms:.1f}." in page
    assert round(23.1 - active_parameters(spec) / 16 / read_per_ms) == 22 > still_ms
    assert f"the estimate, with graphs, is {96e3 / speed.tokens_per_s:.0f} ms" in page


@pytest.mark.parametrize(("gpu", "capability"), [("a100", "8.0"), ("b200", "10.0")])
def test_a_plan_refuses_fp8_servers_on_gpus_that_have_none(gpu, capability, capsys):
    words = [f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.server.tensor_model_parallel_size=4"]
    assert main(["plan", "--config", recipe("dapo_qwen3_235b_a22b"), "--hardware", gpu, *words]) == 2
    printed = capsys.readouterr().err
    assert f"{ROLLOUT}.quantization is fp8" in printed and f"but {gpu} has {capability} (--hardware)" in printed
