"""Demands of shared GPUs (`hybrid_engine`) on this machine, before the first process of a run.

A launcher asks, before it starts anything: later the run's own processes hold memory.
"""

import math
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_dapo.checks.model_checks import read_model_specs
from megatron_dapo.common.sizes import GB, MIB
from megatron_dapo.config.derived import offload_fraction, shares_gpus
from megatron_dapo.config.key_names import MEGATRON
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.server_memory import parked_on_host

# Bytes in use on a GPU without a process of its own: the driver, a screen.
OF_NOBODY = 1 * GB
_QUERY_S = 60.0
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it."""

    name: str
    """Its number."""
    uuid: str
    memory: int
    """Bytes."""
    used: int
    """Bytes, of all processes."""


@dataclass(frozen=True)
class Machine:
    """What a machine has, before a run starts."""

    gpus: tuple[Gpu, ...]
    """Those of the run; empty if no driver answers."""
    available: float
    """Bytes of memory that new processes may take."""


def machine_here(names: Collection[str] | None = None) -> Machine:
    """Return this machine with the GPUs of these names; None: with all. Without a driver it has
    none."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        listing = ""
    gpus = [gpu for gpu in parsed(listing) if names is None or {gpu.name, gpu.uuid} & set(names)]
    return Machine(tuple(gpus), min(psutil.virtual_memory().available, _container_limit()))


def parsed(listing: str) -> Iterator[Gpu]:
    """Yield the GPUs of nvidia-smi's answer; a line of a lost or a sharing (MIG) GPU says nothing."""
    for line in listing.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and all(cell.isdecimal() for cell in cells[2:]):
            yield Gpu(cells[0], cells[1], int(cells[2]) * MIB, int(cells[3]) * MIB)


def _container_limit() -> float:
    """Return the bytes of memory that this container may use."""
    try:
        return int(_CONTAINER_LIMIT.read_text())
    except (OSError, ValueError):  # no container, or "max"
        return math.inf


def shared_gpu_faults(config: Config, machine: Machine) -> Iterator[str]:
    """Yield mistakes about GPUs that trainer and servers share, and about the memory that what
    leaves them is parked in. Without GPUs nothing is pinned."""
    if not shares_gpus(config) or not machine.gpus:
        return
    size = config.trainer.gpu_memory_gb
    for gpu in machine.gpus:
        if gpu.memory < size * GB:
            yield (
                f"trainer.gpu_memory_gb is {size:g}, but GPU {gpu.name} has {gpu.memory / GB:.1f} GB; set it to "
                f"{gpu.memory // GB} or less, and read the plan again."
            )
        if gpu.used > OF_NOBODY:
            yield (
                f"GPU {gpu.name} has {gpu.used / GB:.1f} GB in use by other processes, but actor_rollout_ref."
                f"hybrid_engine is true, whose trainer and servers need all of it; end them (nvidia-smi shows them), "
                f"or choose another GPU by CUDA_VISIBLE_DEVICES."
            )
    yield from _parked_memory(config, machine)


def _parked_memory(config: Config, machine: Machine) -> Iterator[str]:
    if (specs := read_model_specs(config)) is None:
        return
    if (needed := parked_on_host(config, *specs)) <= machine.available:
        return
    whose = f"{MEGATRON}.param_offload and optimizer_offload"
    whose += f", and optimizer_offload_fraction {fraction:g}" if (fraction := offload_fraction(config)) else ""
    yield (
        f"This machine has {machine.available / GB:.0f} GB of memory available, but what leaves its GPUs takes "
        f"{needed / GB:.0f} GB ({whose}); end other processes, ask the scheduler for more memory, or train adapters "
        f"(actor_rollout_ref.model.lora_rank)."
    )
