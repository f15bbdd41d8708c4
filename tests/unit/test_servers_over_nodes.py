"""Servers over several nodes in the plan: advice, search, text, and a preflight's groups of nodes."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.preflight import all_reduce
from launch.preflight.gpus import needed
from megatron_dapo.commands.plan import search
from megatron_dapo.commands.plan.fitting import (
    NODES_PER_SERVER,
    NUM_SERVERS,
    SERVER,
    SERVER_TP,
    all_server_sizes,
    server_keys,
    server_sizes,
    smallest_server,
)
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.commands.plan.search import ConfigSource
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.commands.plan.step_time import Assumptions, server_of
from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import gpus_per_server_node, machines_per_server, servers_per_node
from megatron_dapo.config.key_names import MEGATRON
from megatron_dapo.config.keys import with_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.model_shapes import MODEL_SHAPES
from megatron_dapo.estimates.server_memory import server_share
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.spec_reader import model_spec
from tests.config_overrides import TP8_PP2

pytestmark = pytest.mark.unit

EIGHT = "but 8 GPUs (trainer.n_procs_per_node)"


def spec_of(name: str) -> ModelSpec:
    return model_spec(MODEL_SHAPES[name])


def servers(number: int, tp: int, over: int, nodes: int, *overrides: str) -> Config:
    """Return the reference recipe with these servers."""
    values = {"num_servers": number, "tensor_model_parallel_size": tp, "nodes_per_server": over, "nnodes": nodes}
    words = (f"{SERVER}.{key}={value}" for key, value in values.items())
    return load_config(recipe("dapo_32b"), [*TP8_PP2, *words, *overrides])


@pytest.mark.parametrize(
    ("model", "quantization", "gigabytes", "size"),
    [
        ("deepseek-v3", "null", 80, (32, 4)),  # 42 GB a GPU, at 16 GPUs 84
        ("deepseek-v3", "null", 141, (16, 2)),
        ("deepseek-v3", "fp8", 80, (16, 2)),
        ("deepseek-v3", "fp8", 141, (8, 1)),
        ("glm-4.5", "null", 80, (16, 2)),
        ("glm-4.5", "null", 141, (8, 1)),
        ("glm-4.5", "fp8", 80, None),  # 88 GB a GPU at TP 4; at more a shared expert has no whole blocks
        ("qwen3-235b-a22b", "null", 80, (8, 1)),
        ("qwen3-235b-a22b", "fp8", 80, (4, 1)),
        ("qwen3-8b", "null", 80, (1, 1)),
    ],
)
def test_the_smallest_server_of_a_model_has_no_more_nodes_than_it_takes(model, quantization, gigabytes, size):
    words = [f"actor_rollout_ref.rollout.quantization={quantization}", f"trainer.gpu_memory_gb={gigabytes}"]
    assert smallest_server(servers(8, 8, 1, 8, *words), spec_of(model)) == size


def test_a_server_has_parts_of_a_node_or_all_of_several_and_one_machine_is_one_node():
    config, spec = servers(8, 8, 1, 8), spec_of("glm-4.5")
    assert server_sizes(config, spec) == [1, 2, 4, 8]
    assert all_server_sizes(config, spec) == [(1, 1), (2, 1), (4, 1), (8, 1), (16, 2), (32, 4)]  # 96 heads
    assert all_server_sizes(servers(1, 8, 1, 0), spec)[-1] == (8, 1)


@pytest.mark.parametrize(
    ("config", "size", "keys"),
    [
        (servers(8, 8, 1, 8), (32, 4), (2, 8)),
        (servers(8, 8, 1, 9), (32, 4), (2, 8)),  # 9 nodes are no whole number of servers
        (servers(1, 8, 1, 1), (16, 2), (1, 2)),
        (servers(16, 4, 1, 8), (2, 1), (16, 8)),  # as many as before
        (servers(16, 4, 1, 8), (8, 1), (8, 8)),
        (servers(6, 8, 2, 4), (8, 2), (4, 4)),  # two on the 16 GPUs of each two nodes
        (servers(4, 1, 1, 0), (2, 1), (2, 0)),  # the same four GPUs of the machine
        (servers(1, 1, 1, 0), (8, 1), (1, 0)),
    ],
)
def test_servers_of_another_size_fit_on_their_nodes(config, size, keys):
    changed = with_keys(config, server_keys(config, *size))
    server = changed.actor_rollout_ref.rollout.server
    assert (server.tensor_model_parallel_size, server.nodes_per_server) == size
    assert (server.num_servers, server.nnodes) == keys
    if server.nnodes:
        assert servers_per_node(changed) * gpus_per_server_node(changed) <= 8


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((8, 16, 1, 8), f"is 16, and each node has 1 server, {EIGHT}; set it to 8 or "
         f"less, or set {NODES_PER_SERVER} to 2 and {NUM_SERVERS} to 4."),
        ((8, 8, 1, 4), f"is 8, and each node has 2 servers, {EIGHT}; set {NUM_SERVERS} to 4."),
        ((2, 32, 2, 4), f"is 32 over 2 nodes, and each node has 1 server, {EIGHT}; set it "
         f"to 16 or less, or set {NODES_PER_SERVER} to 4 and {NUM_SERVERS} to 1."),
        ((8, 16, 2, 8), f"is 16 over 2 nodes, and each node has 2 servers, {EIGHT}; set "
         f"{NUM_SERVERS} to 4."),
        ((8, 18, 1, 8), f"is 18, and each node has 1 server, {EIGHT}; set it to 8 or less, or set {NODES_PER_SERVER} "
         f"to 3, {NUM_SERVERS} to 2 and {SERVER}.nnodes to 6."),  # 18 is no multiple of 4
    ],
)  # fmt: skip
def test_servers_with_more_gpus_than_their_nodes_are_refused_with_the_cure(sizes, words):
    config = servers(*sizes, "trainer.gpu_memory_gb=200")
    (sentence,) = shortage(config, spec_of("qwen3-32b"))
    assert sentence == f"{SERVER_TP} {words}"
    pairs = re.findall(rf"({SERVER}\.\w+) to (\d+)", sentence)
    advised = {key: int(value) for key, value in pairs}
    assert shortage(with_keys(config, advised), spec_of("qwen3-32b")) == []


def test_servers_that_fill_their_nodes_are_not_refused():
    for sizes in ((2, 32, 4, 8), (4, 16, 2, 8), (4, 8, 2, 4), (8, 8, 1, 8)):
        assert shortage(servers(*sizes, "trainer.gpu_memory_gb=200"), spec_of("qwen3-32b")) == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        # 168 GB of weights on each of 8 GPUs, of which SGLang takes 82 %
        ("deepseek-v3", r"of 20\d GB, which none of `plan --hardware` has"),
        ("glm-4.5", r"of 1[01]\d GB, such as h200"),
    ],
)
def test_a_model_too_large_for_one_machine_is_not_told_to_span_nodes(model, words):
    config = servers(1, 8, 1, 0, "trainer.nnodes=64", f"{MEGATRON}.expert_model_parallel_size=32")
    sentence = next(each for each in shortage(config, spec_of(model)) if "A server GPU" in each)
    assert f"without nodes of their own ({SERVER}.nnodes) servers do not span nodes" in sentence
    assert re.search(rf"on the 8 GPUs of one node this model needs GPUs {words}", sentence)
    assert NODES_PER_SERVER not in sentence


@pytest.mark.parametrize(
    ("model", "tp", "gigabytes", "words"),
    [
        ("kimi-k2", 8, 80, r"of 1[56]\d GB, which none of `plan --hardware` has"),  # a b200 has 180
        ("qwen3-235b-a22b", 4, 40, r"of 7\d GB, such as h100"),  # an a100 has 80
    ],
)
def test_of_servers_in_fp8_only_gpus_that_have_them_are_named(model, tp, gigabytes, words):
    keys = ("actor_rollout_ref.rollout.quantization=fp8", f"trainer.gpu_memory_gb={gigabytes}")
    sentence = next(each for each in shortage(servers(1, tp, 1, 0, *keys), spec_of(model)) if "A server GPU" in each)
    assert re.search(rf"this model needs GPUs {words}", sentence)


def test_a_larger_server_leaves_sglang_less_of_a_gpu():
    """SGLang keeps TP / 8 GiB more free: 3 GiB more at TP 32 than at TP 8."""
    spec = spec_of("deepseek-v3")
    shares = [server_share(servers(1, tp, 1, 8, "trainer.gpu_memory_gb=80"), spec) for tp in (4, 8, 32)]
    assert shares[0] == shares[1] == 0.82
    assert (shares[1] - shares[2]) * 80 * GB == pytest.approx(3 * 2**30)


@pytest.mark.parametrize(
    ("model", "over", "sizes"), [("glm-4.5", 2, {16}), ("deepseek-v3", 4, {32}), ("qwen3-32b", 1, {1, 2, 4, 8})]
)
def test_the_search_spans_nodes_only_where_no_node_holds_the_model(model, over, sizes):
    source = ConfigSource(Path(recipe("dapo_32b")), (), MODEL_SHAPES[model])
    config = servers(1, 1, 1, 8)
    assumed = Assumptions.usual(config, HARDWARE["h100"])
    fastest = search._fastest_servers(config, 64, source, assumed, 0)
    assert fastest and {keys[NODES_PER_SERVER] for keys in fastest} == {over}
    assert {keys[SERVER_TP] for keys in fastest} <= sizes
    assert all(keys[NUM_SERVERS] * keys[SERVER_TP] == 64 for keys in fastest)
    few = with_keys(config, {f"{SERVER}.nnodes": over - 1 or 1})
    assert bool(search._fastest_servers(few, 8 * (over - 1 or 1), source, assumed, 0)) is (over == 1)
    in_turns = with_keys(config, {search.SHARED: True, f"{SERVER}.nnodes": 0, "trainer.nnodes": 8})
    fastest = search._fastest_servers(in_turns, 64, source, assumed, 0)
    assert all(keys[NODES_PER_SERVER] == 1 for keys in fastest) and bool(fastest) is (over == 1)


def test_the_plans_of_time_and_of_processes_name_a_servers_nodes():
    config, spec = servers(2, 32, 4, 8), spec_of("deepseek-v3")
    assert "2 SGLang servers x TP 32, each over 4 of 8 server nodes" in process_plan(config)
    assert "8 SGLang servers x TP 8, 1 on each of 8 server nodes" in process_plan(servers(8, 8, 1, 8))
    assumed = Assumptions.usual(config, HARDWARE["h100"])
    far, near = (server_of(each, spec, assumed) for each in (config, servers(2, 32, 1, 8)))
    assert far.token_s - near.token_s == pytest.approx(2 * 61 * 50e-6)
    assert machines_per_server(servers(1, 2, 2, 0)) == 1  # processes of one machine


def test_a_preflight_counts_the_gpus_of_a_servers_part():
    assert needed(servers(2, 32, 4, 8), "server") == 8
    assert needed(servers(4, 8, 2, 4), "server") == 8  # two servers have four each
    assert needed(servers(8, 8, 1, 8), "server") == 8


class Nodes:
    """All nodes of a preflight at once: `answers` of each to the call that another makes."""

    timeout_s, address = 20.0, ("127.0.0.1", 1)

    def __init__(self, index: int, speeds: Sequence[float]) -> None:
        self.index = index
        self._speeds = speeds

    def gather(self, what: str, value: object) -> list:
        if what.endswith("ranks per node"):
            return [2] * len(self._speeds)
        if what.endswith("network"):
            return [value] * len(self._speeds)
        if what.endswith("ring"):
            return list(self._speeds)
        number = int(what.rpartition(" ")[2])  # of the round of pairs: both wait for the slower one
        partners = {0: {1: 4, 4: 1, 2: 3, 3: 2}, 1: {1: 3, 3: 1, 4: 2, 2: 4}, 2: {1: 2, 2: 1, 3: 4, 4: 3}}[number]
        return [None, *(max(self._speeds[node], self._speeds[partners[node]]) for node in range(1, 5))]


class Ranks:
    count, network = 2, "IB"

    def run(self, tasks: Sequence[all_reduce.AllReduceTask], nodes: Nodes) -> float:
        return 0.01

    def end(self) -> None:
        pass


FAST, SLOW = 0.01, 10.0


@pytest.mark.parametrize(
    ("groups", "speeds", "culprits"),
    [
        ([[1, 2], [3, 4]], [None, FAST, FAST, FAST, FAST], []),
        ([[1, 2], [3, 4]], [None, FAST, FAST, SLOW, SLOW], [3, 4]),
        ([[1, 2], [3, 4]], [None, FAST, FAST, all_reduce.OTHERS, "no route"], [4]),
        ([[1, 2, 3, 4]], [None, SLOW, FAST, FAST, FAST], [1]),
    ],
)
def test_of_several_servers_nodes_only_those_at_fault_are_named(groups, speeds, culprits):
    named = []
    for index in range(5):
        rounds = [Ranks()] * 4 if index else []
        result = all_reduce.check(Nodes(index, speeds), "servers", groups, rounds, "nccl", 5.0)
        assert bool(result.found) is bool(index)
        named += [index] if result.problem else []
    assert named == culprits
