"""Trainer and servers on the same GPUs, before they start: memory of each phase, moves, time."""

from dataclasses import dataclass

import pytest

from megatron_dapo.__main__ import main
from megatron_dapo.commands.plan import step_time
from megatron_dapo.commands.plan.process_plan import memory_lines, process_plan
from megatron_dapo.commands.plan.server_time import push_rate, push_s
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.commands.plan.step_time import Assumptions, phase_times, run_time
from megatron_dapo.commands.plan.training_time import Efficiency
from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import servers_per_node
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.memory import kept_free, trainer_memory
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.estimates.recompute import settled
from megatron_dapo.estimates.server_memory import (
    moved_bytes,
    moving_s,
    parked_on_host,
    push_memory,
    server_memory,
    server_share,
)
from megatron_dapo.huggingface.spec_reader import model_spec
from tests.config_overrides import ALL_RECOMPUTED, TP4, TP8_PP2

pytestmark = pytest.mark.unit

MEGATRON = "actor_rollout_ref.actor.megatron"
SERVER = "actor_rollout_ref.rollout.server"
ON_ONE_GPU = (
    "trainer.n_procs_per_node=1",
    f"{MEGATRON}.tensor_model_parallel_size=1",
    f"{MEGATRON}.sequence_parallel=false",
    "data.train_batch_size=64",
    "data.gen_batch_size=192",
    "data.max_response_length=8192",
    "actor_rollout_ref.actor.max_tokens_per_microbatch=10240",
)


@dataclass(frozen=True)
class Row:
    """A model on GPUs of 80 GB, worked out by hand from its parameters: 2, 4 and 12 bytes each."""

    recipe: str
    model: str
    nodes: int
    servers: tuple[int, int]  # number, TP
    states: tuple[float, float, float]  # weights, gradients, optimizer: GB of a GPU
    kept: float  # by trainer and sleeping server
    peak: float  # of training
    push: float
    share: float
    cache: tuple[float, float]  # GB, million tokens
    moved: float
    pinned: float  # per node
    step: float  # seconds, without the switch
    overrides: tuple[str, ...] = ()


EXPERTS = "dapo_qwen3_30b_a3b"
ROWS = (
    Row("dapo_7b", "qwen2.5-1.5b", 1, (1, 1), (3.1, 6.2, 18.5), 3.5, 37.5, 11, 0.80, (61, 2.1), 21.6, 22, 362,
        ON_ONE_GPU),
    Row("dapo_7b", "qwen2.5-7b", 1, (4, 2), (3.8, 7.6, 11.4), 12, 39, 26, 0.70, (48, 1.7), 15.2, 122, 4180,
        tuple(TP4)),
    Row(EXPERTS, "qwen3-30b-a3b", 1, (2, 4), (8.0, 16.1, 45.8), 14, 87.5, 42, 0.68, (39, 1.6), 8.0, 64, 6737),
    Row("dapo_32b", "qwen2.5-32b", 16, (32, 4), (4.1, 8.2, 3.1), 12, 31, 38, 0.70, (40, 0.60), 7.2, 58, 1620,
        tuple(TP8_PP2)),
)  # fmt: skip
OFFLOADED = f"{MEGATRON}.optimizer_offload_fraction=1.0"


def shared(row: Row, *overrides: str):
    """Return the config of a row, and its model."""
    number, tp = row.servers
    keys = ["actor_rollout_ref.hybrid_engine=true", f"trainer.nnodes={row.nodes}", f"{SERVER}.nnodes=0"]
    keys += [f"{SERVER}.num_servers={number}", f"{SERVER}.tensor_model_parallel_size={tp}"]
    config = load_config(recipe(row.recipe), [*ALL_RECOMPUTED, *keys, *row.overrides, *overrides])
    return config, model_spec(model_json_named(row.model))


def gb(number: float) -> float:
    return number / GB


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model)
def test_who_holds_what_is_what_was_worked_out_by_hand(row):
    """All to the last digit that the row gives."""
    config, spec = shared(row)
    parts = trainer_memory(config, spec)
    states = [gb(parts.weights), gb(parts.gradients), gb(parts.optimizer)]
    assert states == pytest.approx(row.states, abs=0.07)
    assert parts.weight_sync == 0, "buckets are there when gradients and optimizer state are not"
    assert gb(kept_free(config, spec)) == row.kept
    assert gb(parts.total + kept_free(config, spec)) == pytest.approx(row.peak, abs=0.6)
    assert gb(push_memory(config, spec)) == pytest.approx(row.push, abs=0.6)
    assert server_share(config, spec) == row.share
    server = server_memory(config, spec)
    assert (gb(server.kv_cache), server.num_tokens / 1e6) == pytest.approx(row.cache, abs=0.6)
    assert server.num_tokens / 1e6 == pytest.approx(row.cache[1], abs=0.06)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model)
def test_what_moves_and_where_it_is_parked_is_what_was_worked_out_by_hand(row):
    """A mixture's Adam is on the host: it stays there, with 16 bytes per parameter."""
    is_mixture = row.model == "qwen3-30b-a3b"
    config, spec = shared(row, *([OFFLOADED] if is_mixture else []))
    assert gb(moved_bytes(config, spec)) == pytest.approx(row.moved, abs=0.06)
    on_host = 489 if is_mixture else 0
    assert gb(parked_on_host(config, spec)) == pytest.approx(row.pinned + on_host, abs=1)
    at_once = 1 if row.nodes * config.trainer.n_procs_per_node == 1 else 2
    assert moving_s(config, moved_bytes(config, spec)) == pytest.approx(at_once * row.moved / 55, rel=0.02)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model)
def test_a_step_takes_both_phases_on_all_gpus_and_the_switch(row):
    """Adam's seconds on the host come on top."""
    config, spec = shared(row)
    run = run_time(config, spec, Assumptions.usual(config, HARDWARE["h100"]), [0])
    (step,) = run.steps
    moving = 2 * moving_s(config, moved_bytes(config, spec))
    assert run.parts.moving == pytest.approx(moving)
    assert run.num_gpus == row.nodes * config.trainer.n_procs_per_node
    assert step.step == pytest.approx(step.sampling + run.parts.train_s + run.parts.push + moving)
    assert step.sampling + run.parts.train_s == pytest.approx(row.step, rel=0.06)  # of one simulation


@pytest.mark.parametrize(("model", "nodes", "seconds"), [("qwen2.5-7b", 1, 0.05), ("qwen2.5-32b", 16, 1.8)])
def test_a_push_by_handles_brings_the_model_to_each_gpu_once(model, nodes, seconds):
    (row,) = [row for row in ROWS if row.model == model]
    assert row.nodes == nodes
    config, spec = shared(row)
    rate = push_rate(config, HARDWARE["h100"], Efficiency())
    assert push_s(spec, 10**6, rate) - 0.005 == pytest.approx(seconds, rel=0.1)


def test_a_smaller_card_leaves_the_servers_a_smaller_share():
    """0.82 of 24 GB without the 1.5 GB that the trainer keeps: 0.7575."""
    config, spec = shared(ROWS[0], "trainer.gpu_memory_gb=24")
    assert server_share(config, spec) == 0.75
    said, _ = shared(ROWS[0], "trainer.gpu_memory_gb=24", f"{SERVER}.mem_fraction_static=0.6")
    assert server_share(said, spec) == 0.6
    apart = load_config(recipe("dapo_7b"))
    assert server_share(apart, spec) == 0.82


def test_what_is_not_offloaded_stays_beside_the_servers_and_is_not_moved():
    config, spec = shared(ROWS[1])
    kept, _ = shared(ROWS[1], f"{MEGATRON}.optimizer_offload=false")
    parts = trainer_memory(config, spec)
    assert moved_bytes(kept, spec) == parts.weights
    assert server_share(kept, spec) == pytest.approx(0.82 - (9 + 11.4) / 80, abs=0.01)
    assert push_memory(kept, spec) - push_memory(config, spec) == parts.optimizer
    nothing, _ = shared(ROWS[1], f"{MEGATRON}.optimizer_offload=false", f"{MEGATRON}.param_offload=false")
    assert moved_bytes(nothing, spec) == 0
    assert server_share(nothing, spec) == pytest.approx(0.82 - (9 + 11.4 + 3.8) / 80, abs=0.01)


def test_reference_and_critic_leave_the_gpus_too():
    (row,) = [row for row in ROWS if row.model == "qwen2.5-7b"]
    plain, spec = shared(row)
    with_reference, _ = shared(
        row, "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1"
    )
    parts = trainer_memory(with_reference, spec)
    assert moved_bytes(with_reference, spec) - moved_bytes(plain, spec) == parts.reference > 0
    with_critic, _ = shared(row, "algorithm.adv_estimator=gae")
    more = moved_bytes(with_critic, spec) - moved_bytes(plain, spec)
    assert more == pytest.approx(parts.weights + parts.optimizer, rel=0.1)


def test_each_node_has_its_part_of_the_servers():
    config, _ = shared(ROWS[3])
    assert servers_per_node(config) == 2


REFUSED = [
    # 80 GB hold Adam of 30 B parameters on no 8 of them, the host does
    (ROWS[2], (), ["A trainer GPU would need", "kept free for both users of a shared GPU", OFFLOADED]),
    (ROWS[0], ("trainer.gpu_memory_gb=24",), ["A trainer GPU would need", OFFLOADED]),
    (ROWS[0], ("trainer.gpu_memory_gb=14",), ["A trainer GPU would need", "actor_rollout_ref.model.lora_rank=32"]),
    (ROWS[2], (OFFLOADED, "trainer.gpu_memory_gb=18"), ["A trainer GPU would need", "not even adapters"]),
    (ROWS[1], (f"{SERVER}.mem_fraction_static=0.9",), 
     ["mem_fraction_static 0.9 is 72 GB", "leave mem_fraction_static null"]),
    (ROWS[3], (f"{SERVER}.tensor_model_parallel_size=1", f"{SERVER}.num_servers=128"),
     ["A push would need about", f"set {SERVER}.tensor_model_parallel_size to 2", "num_servers to 64"]),
    (ROWS[1], (f"{MEGATRON}.optimizer_offload=false", f"{SERVER}.tensor_model_parallel_size=1",
               f"{SERVER}.num_servers=8", "trainer.gpu_memory_gb=45"),
     ["A server GPU would have", "optimizer_offload to true"]),
]  # fmt: skip


@pytest.mark.parametrize(("row", "overrides", "words"), REFUSED)
def test_what_does_not_fit_in_turns_is_refused_with_the_cure(row, overrides, words):
    config, spec = shared(row, *overrides)
    sentences = [sentence for sentence in shortage(config, spec) if words[0] in sentence]
    assert len(sentences) == 1 and all(word in sentences[0] for word in words[1:]), shortage(config, spec)


@pytest.mark.parametrize("row", [ROWS[0], ROWS[1], ROWS[3]], ids=lambda row: row.model)
def test_what_fits_is_not_refused(row):
    config, spec = shared(row)
    assert shortage(config, spec) == []


def test_the_plan_shows_both_phases_and_what_moves():
    config, spec = shared(ROWS[1])
    text = "\n".join(memory_lines(config, (spec, None)))
    for words in (
        "of 80 GB per GPU, 12 kept free",
        "sampling: 65.0 of 80 GB per GPU: the server's weights and cache 56.0 (mem_fraction_static 0.7)",
        "kept by the trainer 9.0",
        "push by handles: 26.1 GB per GPU",
        "moved each way: 15.2 GB per GPU, 0.55 s at 55 GB/s, all GPUs of a node at once; 121.",
        "GB of each node's memory are pinned for it",
    ):
        assert words in text, text
    plan = process_plan(config)
    assert "on the same 8 GPUs: one sleeps while the other works" in plan
    assert "handles of memory on the same GPU, buckets of 256 MB" in plan


def test_the_time_plan_of_shared_gpus_has_one_column_and_the_switch(capsys, monkeypatch):
    monkeypatch.setattr(step_time, "SIMULATED_REQUESTS", 200)
    assert main(["plan", "--config", recipe("one_node_7b")]) == 0
    shown = capsys.readouterr().out
    assert "8 train (TP 2, PP 1, DP 4) and sample in turns (2 servers x TP 4)" in shown
    assert "max_staleness K                                    0\n" in shown
    assert "memory moved, both ways" in shown and "move nodes to" not in shown


def test_slower_pcie_makes_the_switch_longer():
    """31 GB/s of PCIe 4.0 in place of 55."""
    config, spec = shared(ROWS[0])
    times = [phase_times(config, spec, Assumptions.usual(config, HARDWARE[name])).moving for name in ("h100", "a100")]
    assert times[1] / times[0] == pytest.approx(55 / 31)


@pytest.mark.parametrize(("gigabytes", "is_offloaded"), [(24, True), (48, False), (80, False)])
def test_the_recipe_of_one_gpu_fits_each_card_by_what_its_auto_values_stand_for(gigabytes, is_offloaded):
    config = load_config(recipe("one_gpu_1.5b"), [f"trainer.gpu_memory_gb={gigabytes}"])
    spec = model_spec(model_json_named("qwen2.5-1.5b"))
    chosen = settled(config, spec)
    assert shortage(chosen, spec) == []
    megatron = chosen.actor_rollout_ref.actor.megatron
    assert (megatron.optimizer_offload_fraction > 0) == is_offloaded
    assert "auto" not in (megatron.optimizer_offload_fraction, megatron.recompute_granularity)
    assert chosen.data == config.data, "what is learned does not depend on the card"


def test_the_least_share_of_adam_that_fits_is_on_the_host():
    spec = model_spec(model_json_named("qwen2.5-1.5b"))
    for gigabytes in (20, 24, 28, 32, 36, 40):
        keys = [f"trainer.gpu_memory_gb={gigabytes}"]
        chosen = settled(load_config(recipe("one_gpu_1.5b"), keys), spec)
        share = chosen.actor_rollout_ref.actor.megatron.optimizer_offload_fraction
        less = [*keys, f"{MEGATRON}.optimizer_offload_fraction={max(share - 0.25, 0)}"]
        assert not shortage(chosen, spec)
        assert share == 0 or shortage(settled(load_config(recipe("one_gpu_1.5b"), less), spec), spec)
