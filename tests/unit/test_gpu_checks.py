"""Shared GPUs on a machine that has too little, or has others on it: one sentence each."""

from dataclasses import replace

import pytest

from examples.arithmetic.demo import on_gpus
from launch.preflight import gpus
from megatron_dapo.checks import gpu_checks
from megatron_dapo.checks.gpu_checks import Gpu, Machine, machine_here, parsed, shared_gpu_faults
from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import shares_gpus
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe

pytestmark = pytest.mark.unit

CARD = Gpu("0", "GPU-0", memory=85 * GB, used=int(0.6 * GB))
PARKED = 152.3  # GB of eight ranks: 2 bytes of half of 7.6 B parameters each, and of all 12 bytes together


def faults(machine: Machine, *overrides: str, name: str = "one_node_7b") -> list[str]:
    return list(shared_gpu_faults(load_config(recipe(name), list(overrides)), machine))


def test_a_machine_that_has_all_is_not_refused():
    assert faults(Machine((CARD,) * 8, available=(PARKED + 1) * GB)) == []


def test_a_gpu_with_a_foreign_process_is_named():
    foreign = Gpu("3", "GPU-3", memory=85 * GB, used=31 * GB)
    (sentence,) = faults(Machine((CARD, foreign), available=1000 * GB))
    assert "GPU 3 has 31.0 of 85.0 GB in use by other processes" in sentence and "CUDA_VISIBLE_DEVICES" in sentence


def test_a_screen_beside_room_enough_is_no_foreign_process():
    card = Gpu("0", "GPU-0", memory=int(25.8 * GB), used=int(1.4 * GB))
    memory = Machine((card,), available=1000 * GB)
    assert faults(memory, "trainer.gpu_memory_gb=24", name="one_gpu_1.5b") == []
    (sentence,) = faults(memory, "trainer.gpu_memory_gb=25", name="one_gpu_1.5b")
    assert "set it to 24 or less" in sentence


def test_a_gpu_for_one_process_alone_is_named():
    exclusive = replace(CARD, mode="Exclusive_Process")
    (sentence,) = faults(Machine((exclusive,), available=1000 * GB))
    assert "compute mode Exclusive_Process" in sentence and "nvidia-smi -c 0" in sentence


def test_a_card_smaller_than_said_is_named_with_its_size():
    small = Gpu("0", "GPU-0", memory=int(25.7 * GB), used=0)
    (sentence,) = faults(Machine((small,), available=1000 * GB))
    assert sentence.startswith("trainer.gpu_memory_gb is 80, but GPU 0 has 25.7 GB; set it to 25 or less")
    assert faults(Machine((small,), available=1000 * GB), "trainer.gpu_memory_gb=24", name="one_gpu_1.5b") == []


def test_too_little_memory_for_what_leaves_the_gpus_is_named_with_both_sizes():
    (sentence,) = faults(Machine((CARD,), available=(PARKED - 1) * GB))
    assert "has 151 GB of memory available" in sentence and "takes 152 GB" in sentence and "param_offload" in sentence
    (sentence,) = faults(Machine((CARD,), available=500 * GB), name="one_node_qwen3_30b_a3b_full")
    assert "takes 571 GB" in sentence and "optimizer_offload_fraction 1" in sentence


def test_nothing_is_asked_of_gpus_that_are_not_shared_or_not_there():
    little = Machine((Gpu("0", "GPU-0", memory=GB, used=GB),), available=0)
    assert not faults(little, name="one_node_7b_async") and not faults(little, name="dapo_7b")
    assert not faults(Machine((), available=0))


def test_the_drivers_listing_is_read_without_gpus_that_do_not_answer():
    listing = (
        "0, GPU-a1, 81559, 4, Default\n1, GPU-b2, [Unknown Error], [N/A], [N/A]\n"
        "2, GPU-c3, 24564, 812, Prohibited\nUnable to determine\n"
    )
    mib = 2**20
    assert list(parsed(listing)) == [
        Gpu("0", "GPU-a1", 81559 * mib, 4 * mib),
        Gpu("2", "GPU-c3", 24564 * mib, 812 * mib, "Prohibited"),
    ]


def test_only_the_named_gpus_are_looked_at(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-a1, 100, 1, Default'\necho '1, GPU-b1, 100, 1, Default'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert [[gpu.name for gpu in machine_here(names).gpus] for names in (None, [" 1"], ["GPU-a"], [""])] == [
        ["0", "1"],
        ["1"],
        ["0"],
        [],
    ]
    assert machine_here().available > 0


def test_a_shared_gpu_is_needed_once():
    config = load_config(recipe("one_node_7b"))
    assert [gpus.needed(config, role) for role in ("trainer", "server", "both")] == [8, 8, 8]


@pytest.mark.parametrize(
    ("number", "torch", "ranks", "tp", "servers", "is_shared"),
    [
        (0, "2.13.0", 2, 2, 1, False),
        (1, "2.13.0+cpu", 2, 2, 1, False),
        (1, "2.13.0", 1, 1, 1, True),
        (2, "2.13.0", 2, 2, 2, True),
        (3, "2.13.0", 2, 2, 1, False),
        (8, "2.13.0", 2, 2, 1, False),
    ],
)
def test_the_demo_takes_the_gpus_that_it_is_told_of(number, torch, ranks, tp, servers, is_shared):
    cards = [Gpu(str(i), f"GPU-{i}", memory=int(25.7 * GB), used=0) for i in range(number)]
    config = load_config(recipe("demo"), on_gpus(cards, torch))
    megatron = config.actor_rollout_ref.actor.megatron
    assert config.trainer.n_procs_per_node == ranks and shares_gpus(config) is is_shared
    assert megatron.tensor_model_parallel_size == tp and megatron.sequence_parallel is (tp > 1)
    server = config.actor_rollout_ref.rollout.server
    assert server.num_servers * server.tensor_model_parallel_size == servers
    assert config.trainer.gpu_memory_gb == (25 if cards and "cpu" not in torch else 80)


def test_the_memory_of_a_control_group_is_what_it_leaves(tmp_path):
    """A job's limit may lie above its own group, and counts less what is in use."""
    group = tmp_path / "job" / "step"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    (tmp_path / "job" / "memory.max").write_text("1000\n")
    (tmp_path / "job" / "memory.current").write_text("300\n")
    assert gpu_checks.left_by_groups(tmp_path, "job/step") == 700
    assert gpu_checks.left_by_groups(tmp_path, "elsewhere") > 10**15
