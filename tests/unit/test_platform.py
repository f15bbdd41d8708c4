"""The CPU adaptation of Megatron-core is a documented table,
and names its row that no longer fits."""

import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from megatron_dapo import platform
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.platform import megatron_cpu
from megatron_dapo.platform.device import device, model_dtype, prepare_megatron, require_usable_gpus
from megatron_dapo.servers.supervisor import ServerSupervisor
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


def test_every_adaptation_names_its_target_once_and_says_why():
    targets = [row.target for row in megatron_cpu.ADAPTATIONS]
    assert len(set(targets)) == len(targets)
    assert all(len(row.why) > 15 for row in megatron_cpu.ADAPTATIONS)


class Ranks:
    """A process group, as far as it is asked for its size."""

    def __init__(self, number: int) -> None:
        self._number = number

    def size(self) -> int:
        return self._number


@pytest.mark.parametrize(
    ("num_ranks", "in_place", "async_op", "is_done"),
    [(1, True, False, False), (2, True, False, True), (1, False, False, True), (1, True, True, True)],
)
def test_gradients_of_a_single_rank_are_not_copied(num_ranks, in_place, async_op, is_done):
    """Only if nothing would change, and nobody waits for a handle."""
    target = "megatron.core.distributed.param_and_grad_buffer.dist_reduce_scatter_func"
    (row,) = (row for row in megatron_cpu.ADAPTATIONS if row.target == target)
    calls = []
    collective = row.make(lambda output, input, **options: calls.append(options))
    buffer, group = torch.zeros(4), Ranks(num_ranks)
    shard = buffer[:4] if in_place else torch.zeros(4)
    collective(shard, buffer, op="sum", group=group, async_op=async_op)
    assert calls == ([{"op": "sum", "group": group, "async_op": async_op}] if is_done else [])


def test_megatrons_groups_of_the_same_ranks_are_one_until_the_next_layout(monkeypatch):
    prepare_megatron()
    from megatron.core import parallel_state

    (row,) = (row for row in megatron_cpu.ADAPTATIONS if row.target.endswith("initialize_model_parallel"))
    made, received = [], []

    def create(ranks, **options):
        made.append(ranks)
        return object()

    monkeypatch.setattr(parallel_state, "create_group", create)
    initialize = row.make(lambda asked: received.extend(parallel_state.create_group(r, timeout=None) for r in asked))
    asked = [[0, 1], [2, 3], [1, 0], [0, 1, 2, 3], [2, 3]]
    initialize(asked)
    assert made == [[0, 1], [2, 3], [0, 1, 2, 3]]
    assert [received.index(group) for group in received] == [0, 1, 0, 3, 1]
    initialize(asked)  # the groups of a layout end with it
    assert len(made) == 6 and not set(received[:5]) & set(received[5:])
    assert parallel_state.create_group is create


def test_it_is_refused_after_megatron_was_imported(monkeypatch):
    monkeypatch.setattr(megatron_cpu, "_applied", False)
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match="before megatron.core is imported"):
        megatron_cpu.apply()


def test_it_is_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(megatron_cpu, "_applied", False)
    with pytest.raises(RuntimeError, match="GPU"):
        megatron_cpu.apply()


def test_on_a_gpu_the_adaptation_is_not_even_imported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(platform, "megatron_cpu")
    monkeypatch.delitem(sys.modules, megatron_cpu.__name__)
    prepare_megatron()
    assert megatron_cpu.__name__ not in sys.modules


# all of the node's GPUs, or only this process's
@pytest.mark.parametrize(("visible", "index"), [(8, 3), (1, 0)])
def test_a_local_rank_takes_its_gpu_or_the_only_one_that_it_is_shown(visible, index, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device() == torch.device("cuda", index)


def test_a_cuda_installation_without_a_driver_imports_all_that_needs_no_gpu_and_warns_of_nothing(tmp_path):
    """A login node, for conversions and trial jobs, or pip's usual torch on a developer's machine.

    Code built only for CUDA cannot be loaded; beside a toolkit torch would warn in each rank.
    """
    (tmp_path / "flash_mla").mkdir()
    (tmp_path / "flash_mla" / "__init__.py").write_text(
        "raise OSError('libcuda.so.1: cannot open shared object file: No such file or directory')\n"
    )
    modules = [f"checkpoints_tools.{file.stem}" for file in (REPOSITORY / "checkpoints_tools").glob("[!_]*.py")]
    modules += ["megatron_dapo.__main__", "megatron_dapo.trainer", "launch.slurm.__main__", "launch.preflight.__main__"]
    code = """
import importlib, sys, torch
torch.version.cuda, torch.cuda._is_compiled, torch.cuda.is_available = "13.0", lambda: True, lambda: False
for name in sys.argv[1:]:
    importlib.import_module(name)
from torch.utils import cpp_extension
assert cpp_extension.CUDA_HOME
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, *modules]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "CUDA runtime" not in done.stderr


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)."


def driver_that_torch_cannot_use(monkeypatch, tmp_path) -> None:
    """As of torch 2.14 for CUDA 13 on a machine with a driver for CUDA 12."""

    def init() -> None:
        raise RuntimeError(f"{TOO_OLD}\nPlease update your GPU driver")

    (tmp_path / "version").touch()
    monkeypatch.setattr("megatron_dapo.common.nvidia_driver.VERSION_FILE", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_that_torch_cannot_use_are_a_mistake_and_not_a_cpu(monkeypatch, tmp_path):
    driver_that_torch_cannot_use(monkeypatch, tmp_path)
    with pytest.raises(UserError) as error:
        require_usable_gpus()
    (sentence,) = error.value.sentences
    assert TOO_OLD in sentence and "CUDA_VISIBLE_DEVICES=" in sentence


def test_servers_of_a_config_are_not_started_on_the_cpu_beside_gpus_that_torch_cannot_use(monkeypatch, tmp_path):
    driver_that_torch_cannot_use(monkeypatch, tmp_path)
    with pytest.raises(UserError, match="cannot use a GPU here"):
        ServerSupervisor(load_config(None, ["actor_rollout_ref.model.path=some/model"]), tmp_path)


@pytest.mark.parametrize("reason", ["hidden by the user", "torch of the CPU", "no driver", "usable"])
def test_elsewhere_nothing_is_refused(reason, monkeypatch, tmp_path):
    driver_that_torch_cannot_use(monkeypatch, tmp_path)
    if reason == "hidden by the user":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    elif reason == "torch of the CPU":
        monkeypatch.setattr(torch.version, "cuda", None)
    elif reason == "no driver":
        (tmp_path / "version").unlink()
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_usable_gpus()


def test_a_target_that_moved_is_named_and_outside_the_table_torch_stays_as_it_is():
    """In a process of its own, with nothing adapted yet: all rows of the table, then a misfit."""
    code = """
import torch
before = {name: getattr(torch, name) for name in ("empty", "ones", "full", "arange", "compile", "randn")}
from megatron_dapo.platform import megatron_cpu
from megatron_dapo.platform.device import prepare_megatron
gone = "megatron.core.tensor_parallel.random.no_such_name"
megatron_cpu.ADAPTATIONS += (megatron_cpu.Adaptation(gone, "a test", lambda original: original),)
try:
    prepare_megatron()
except megatron_cpu.MovedError as error:
    assert gone in str(error)
else:
    raise AssertionError("not noticed")
assert all(getattr(torch, name) is f for name, f in before.items())
assert torch.zeros(2, device="cuda").device.type == "cpu" and torch.zeros(2).device.type == "cpu"
assert torch.zeros(2, device=torch.device("meta")).device.type == "meta"
with torch.device("meta"):
    assert {torch.zeros(2).device.type, torch.tensor(1.0).device.type, torch.ones(2).device.type} == {"meta"}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_auto_means_float32_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert model_dtype("auto") == torch.float32
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert model_dtype("auto") == torch.bfloat16
    assert model_dtype("float32") == torch.float32
