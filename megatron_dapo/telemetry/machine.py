"""The hardware and packages of a run, for its report: machine.json in the run folder."""

import importlib.metadata
import json
import os
import platform
from pathlib import Path

import torch

from megatron_dapo.common.files import write_whole
from megatron_dapo.common.sizes import GIB
from megatron_dapo.platform.device import is_gpu

_PACKAGES = ("megatron_dapo", "torch", "megatron-core", "sglang", "triton", "transformer-engine")


def write_machine(path: Path, num_ranks: int) -> None:
    """Write rank 0's hardware, the number of the trainer's ranks and the versions of packages."""
    write_whole(path, json.dumps(_machine(num_ranks), indent=1) + "\n")


def _machine(num_ranks: int) -> dict[str, str | int | float | dict[str, str]]:
    described: dict[str, str | int | float | dict[str, str]] = {
        "trainer_ranks": num_ranks,
        "device": "cpu",
        "cpu": _cpu_model(),
        "cpu_cores": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "versions": {"python": platform.python_version(), **_versions()},
    }
    if is_gpu():
        properties = torch.cuda.get_device_properties(0)
        described |= {
            "device": properties.name,
            "gpus_per_node": torch.cuda.device_count(),
            "gpu_memory_gib": round(properties.total_memory / GIB, 1),
        }
    return described


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str]:
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed
