"""The plan of models with gated delta nets: states, operations and memory, counted by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_dapo.commands.plan.fitting import least_server_memory, server_sizes
from megatron_dapo.commands.plan.search import ConfigSource, candidates
from megatron_dapo.commands.plan.server_time import active_parameters
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.commands.plan.step_time import Assumptions, server_of, slots_in_cache
from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import ParallelSizes
from megatron_dapo.config.keys import with_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.flops import attention_flops, forward_flops
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.layer_memory import kept_per_token
from megatron_dapo.estimates.memory import activation_bytes, num_parameters
from megatron_dapo.estimates.model_shapes import MODEL_SHAPES
from megatron_dapo.estimates.recompute import settled
from megatron_dapo.estimates.server_memory import server_memory
from megatron_dapo.estimates.server_states import state_bytes
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.spec_reader import model_spec, read_model_spec
from megatron_dapo.models.build import build_model
from tests.config_overrides import mistakes
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

MEGATRON = "actor_rollout_ref.actor.megatron"
SERVER = "actor_rollout_ref.rollout.server"
SERVER_TP = f"{SERVER}.tensor_model_parallel_size"
HYBRIDS = ("qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b")
ONE_RANK = ParallelSizes(tp=1, pp=1, vpp=None, world=1)


def with_arguments(words: str, *overrides: str) -> Config:
    """Return a config of servers with these words in `extra_args`."""
    return load_config(None, [f"{SERVER}.extra_args=[{words}]", "trainer.gpu_memory_gb=80", *overrides])


def spec_of(name: str) -> ModelSpec:
    return model_spec(MODEL_SHAPES[name])


def hybrid_parameters(config: dict) -> int:
    """Count a hybrid's parameters by hand: of delta nets, attention with a gate, MLPs, vocabulary."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["linear_num_value_heads"]
    values, conv = 128 * heads, 2 * 16 * 128 + 128 * heads
    net = hidden * (conv + values + 2 * heads) + 4 * conv + 2 * heads + 128 + hidden * values
    queries, keys = 256 * config["num_attention_heads"], 256 * config["num_key_value_heads"]
    attention = hidden * (2 * queries + 2 * keys + queries) + 2 * 256
    mlp = 3 * hidden * (512 if "num_experts" in config else config["intermediate_size"])
    if "num_experts" in config:  # each expert and the shared one, the router, the shared one's gate
        mlp = (config["num_experts"] + 1) * mlp + config["num_experts"] * hidden + hidden
    norms = 2 * hidden * layers + hidden
    return layers // 4 * (3 * net + attention) + layers * mlp + norms + 2 * config["vocab_size"] * hidden


@pytest.mark.parametrize(("name", "active"), [*zip(HYBRIDS, (7.9, 25.6, 2.9, 3.6), strict=True)])
def test_a_hybrids_shape_by_name_has_its_parameters(name, active):
    """Their names say 9, 27, 35 with 3, and 80 with 3 billion."""
    spec = spec_of(name)
    assert sum(num_parameters(spec, ONE_RANK, 0)) == hybrid_parameters(MODEL_SHAPES[name])
    assert round(active_parameters(spec) / 1e9, 1) == active


@pytest.mark.parametrize(
    ("name", "layers", "heads", "kv_kib"),
    [("qwen3.5-9b", 24, 32, 32), ("qwen3.5-27b", 48, 48, 64), ("qwen3.5-35b-a3b", 30, 32, 20),
     ("qwen3-next-80b-a3b", 36, 32, 24)],
)  # fmt: skip
def test_a_request_has_states_and_a_token_keys_and_values_of_a_quarter_of_the_layers(name, layers, heads, kv_kib):
    spec = spec_of(name)
    convolved = (2 * 16 + heads) * 128
    assert state_bytes(load_config(None), spec) == layers * (heads * 128 * 128 * 4 + convolved * 3 * 2)
    assert server_memory(load_config(None), spec).kv_per_token == kv_kib * 1024


def test_the_states_of_a_server_bound_its_requests_as_sglang_does():
    """Nine tenths as many bytes as the cache's, five states each: 3 + 2 of extra_buffer."""
    spec = spec_of("qwen3.5-9b")
    config = load_config(None, [f"{SERVER_TP}=2", "trainer.gpu_memory_gb=80", "data.max_response_length=8192"])
    server = server_memory(config, spec)
    left = 0.82 * 80e9 - 8_953_803_264
    assert server.states / server.kv_cache == pytest.approx(0.9)
    assert server.states + server.kv_cache == pytest.approx(left, rel=1e-5)  # norms are whole on both GPUs
    assert server.num_requests == int(left * 0.9 / 1.9 // (5 * (24 * (32 * 128 * 128 * 4 + 8192 * 6)) // 2))
    assumed = Assumptions.usual(config, HARDWARE["h100"])
    assert slots_in_cache(config, spec, assumed) == server.num_requests, "its cache holds more"
    dense = model_spec(MODEL_SHAPES["qwen3-8b"])
    assert server_memory(config, dense).num_requests is None and server_memory(config, dense).states == 0


def test_the_ratio_of_states_is_the_one_that_servers_are_given():
    spec = spec_of("qwen3.5-9b")
    option = "--mamba-full-memory-ratio"
    for words, ratio in (
        (f'--context-length,"12288",{option},"4"', 4.0),
        (f"{option}=2", 2.0),
        (f"{option},'2e0'", 2.0),
        (f'{option}=3,{option},"2"', 2.0),
        (option, 0.9),  # SGLang refuses it itself
    ):
        server = server_memory(with_arguments(words), spec)
        assert server.states / server.kv_cache == pytest.approx(ratio), words


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "two"])
def test_a_ratio_that_is_no_number_above_0_is_refused(value):
    (sentence,) = mistakes(f"rollout.server.extra_args=[--mamba-full-memory-ratio={value}]")
    assert f"--mamba-full-memory-ratio {value}" in sentence and "above 0" in sentence


@pytest.mark.parametrize(
    ("words", "number"),
    [("", 5), ("--disable-radix-cache", 1), ("--mamba-radix-cache-strategy,no_buffer", 3),
     ("--mamba-radix-cache-strategy=extra_buffer_lazy", 4)],
)  # fmt: skip
def test_a_request_takes_as_many_states_as_the_cache_of_prefixes_needs(words, number):
    server = server_memory(with_arguments(words), spec_of("qwen3.5-9b"))
    assert server.states_per_request == number
    assert server.num_requests == server.states // server.state // number


def test_the_number_of_states_is_the_one_that_servers_are_given():
    spec = spec_of("qwen3.5-9b")
    usual = server_memory(with_arguments(""), spec)
    fifty = server_memory(with_arguments("--max-mamba-cache-size=50"), spec)
    assert fifty.states == 50 * fifty.state and fifty.num_requests == 10
    assert fifty.kv_cache + fifty.states == usual.kv_cache + usual.states
    alone = server_memory(with_arguments("--disable-radix-cache", f"{SERVER}.max_running_requests=7"), spec)
    assert alone.num_requests == 7
    dense = model_spec(MODEL_SHAPES["qwen3-8b"])
    assert server_memory(with_arguments("--max-mamba-cache-size=50"), dense).states == 0


def test_a_states_type_is_the_options_else_the_runs_float32_else_that_of_config_json():
    shape = MODEL_SHAPES["qwen3.5-9b"]
    recurrent, convolved = 24 * 32 * 128 * 128, 24 * 8192 * 3
    in_half = model_spec(shape | {"mamba_ssm_dtype": "bfloat16"})
    option = "--mamba-ssm-dtype=float16"
    for config, spec, widths in (
        (with_arguments(""), in_half, (2, 2)),
        (with_arguments(option), model_spec(shape), (2, 2)),
        (with_arguments("", f"{MEGATRON}.dtype=float32"), in_half, (4, 4)),
        (with_arguments(option, f"{MEGATRON}.dtype=float32"), in_half, (2, 4)),
        (with_arguments(""), model_spec(shape | {"mamba_ssm_dtype": "float8"}), (4, 2)),  # SGLang's own then
    ):
        assert state_bytes(config, spec) == recurrent * widths[0] + convolved * widths[1]


@pytest.mark.parametrize("words", ["", "--mamba-full-memory-ratio=0.0001", "--max-mamba-cache-size=6"])
def test_the_least_memory_of_a_server_has_room_for_a_requests_states(words):
    spec = spec_of("qwen3.5-9b")
    config = with_arguments(words, "trainer.n_procs_per_node=8", "data.max_response_length=8192")
    longest = config.data.max_prompt_length + 8192
    gigabytes = least_server_memory(config, spec) / GB
    for more, holds in ((0.01, True), (-0.1, False)):
        changed = with_keys(config, {SERVER_TP: 8, "trainer.gpu_memory_gb": gigabytes + more})
        assert server_memory(changed, spec).holds(longest) is holds
        assert any("A server GPU" in sentence for sentence in shortage(changed, spec)) is not holds


def test_each_token_of_a_request_reads_and_writes_its_states():
    spec = spec_of("qwen3.5-27b")
    config = load_config(None, [f"{SERVER_TP}=4", "trainer.gpu_memory_gb=80"])
    assumed = Assumptions.usual(config, HARDWARE["h100"])
    without = replace(spec, delta_net=replace(spec.delta_net, value_dim=0))
    seconds = [server_of(config, each, assumed).token_s_per_request for each in (spec, without)]
    # as many bytes as 4600 tokens of keys and values, 0.3 GB
    assert seconds[0] - seconds[1] > 0.9 * 0.3e9 / (4 * 3.35e12 * 0.7)
    assert 2 * state_bytes(config, spec) / (64 * 1024) == pytest.approx(4600, rel=0.03)


def test_a_delta_net_has_six_operations_per_number_of_its_state_and_attention_a_quarter_of_the_layers():
    spec = spec_of("qwen3.5-9b")
    pairs = 8 * (5 * 6 // 2 + 3 * 4 // 2)
    recurrent = 24 * 8 * (6 * 32 * 128 * 128 + 2 * 4 * 8192)
    assert attention_flops(spec, [5, 3]) == 4 * 16 * 256 * pairs + recurrent
    products = 24 * 4096 * (8192 + 4096 + 64 + 4096) + 8 * 4096 * (3 * 4096 + 2 * 1024) + 32 * 3 * 4096 * 12288
    assert forward_flops(spec, [5, 3], 1) == 2 * products * 8 + attention_flops(spec, [5, 3]) + 2 * 4096 * 248320


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_stages_of_a_hybrid_have_its_parameters_whatever_their_kinds_of_layers(name):
    spec = spec_of(name)
    whole = sum(num_parameters(spec, ONE_RANK, 0))
    sizes = ParallelSizes(tp=1, pp=spec.num_layers, vpp=None, world=spec.num_layers)  # three of four without attention
    assert sum(sum(num_parameters(spec, sizes, stage)) for stage in range(spec.num_layers)) == whole
    two = replace(sizes, pp=1, tp=2, world=2)
    cut = sum(num_parameters(spec, two, 0))
    assert whole / 2 < cut < 0.51 * whole or spec.moe, "heads are cut, norms are whole"


def test_a_layer_keeps_its_recurrence_unless_core_attn_is_recomputed():
    """In torch, float32: four rows of a chunk's matrices, keys and values of a head many times."""
    spec = spec_of("qwen3.5-9b")
    in_torch, kernels = (kept_per_token(spec, ONE_RANK, width, 1, [0]) for width in (4, 2))
    assert in_torch.core == 32 * (4 * 64 + 11 * 256) * 4 + 2 * 8192 * 4
    assert kernels.core == 32 * (64 * 2 + 8) + 2 * 8192 * 2
    # of attention the output, the size of a query, and the rotated ones
    assert kept_per_token(spec, ONE_RANK, 2, 1, [0, 1, 2, 3]).core == (3 * kernels.core + 20 * 256 * 2) / 4
    config = load_config(None, [f"{MEGATRON}.recompute_granularity=none"])
    without = load_config(None, [f"{MEGATRON}.recompute_granularity=selective"])
    freed = activation_bytes(config, spec, 0, 1000) - activation_bytes(without, spec, 0, 1000)
    layer = kept_per_token(spec, ONE_RANK, 2, 1, range(32))
    assert freed == pytest.approx(1000 * (32 * layer.core - layer.total), abs=2), "one layer is computed again"


@pytest.mark.parametrize(("recompute", "core"), [("none", True), ("selective", False)])
def test_a_delta_net_in_torch_keeps_about_what_is_estimated(tmp_path, layout, recompute, core):
    """Counted tensor by tensor, in whole chunks, with heads of a published width."""
    widths = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    spec = read_model_spec(make_tiny(tmp_path, "qwen3_5", layers=2, more=widths))
    net = build_model(spec, layout, MegatronConfig(recompute_granularity=recompute)).chunks[0].decoder.layers[0]
    hidden = torch.randn(256, 1, spec.hidden_size, requires_grad=True)
    ours = {tensor.untyped_storage().data_ptr() for tensor in (hidden, *net.self_attention.parameters())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net.self_attention(hidden)
    measured = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in ours)
    per_token = kept_per_token(spec, ONE_RANK, 4, 1, [0])
    assert measured / 256 == pytest.approx(per_token.attention + core * per_token.core, rel=0.15)


def test_servers_and_search_cut_key_heads_and_leave_context_parallelism_to_cpus():
    config = load_config(None, ["trainer.n_procs_per_node=8"])
    spec = spec_of("qwen3.5-9b")
    assert server_sizes(config, spec) == [1, 2, 4, 8]
    assert server_sizes(config, replace(spec, delta_net=replace(spec.delta_net, num_key_heads=2))) == [1, 2]
    mixture = spec_of("qwen3.5-35b-a3b")
    assert server_sizes(config, replace(mixture, moe=replace(mixture.moe, shared_ffn_size=12))) == [1, 2, 4]
    source = ConfigSource(Path(recipe("one_node_7b")), (), MODEL_SHAPES["qwen3.5-9b"])
    config = settled(load_config(source.path), source.actor)
    every = list(candidates(source, config, Assumptions.usual(config, HARDWARE["h100"]), (0,)))
    assert every and {candidate.keys[f"{MEGATRON}.context_parallel_size"] for candidate in every} == {1}
