"""Demands of shared GPUs (`hybrid_engine`) on this machine, before the first process of a run.

A launcher asks, before it starts anything: later the run's own processes hold memory.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_dapo.checks.model_checks import read_model_specs
from megatron_dapo.common import nvidia_driver
from megatron_dapo.common.sizes import GB, MIB
from megatron_dapo.config.derived import offload_fraction, shares_gpus
from megatron_dapo.config.key_names import MEGATRON
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.server_memory import parked_on_host

# Bytes in use on a GPU without a process of its own: the driver, a screen.
OF_NOBODY = 1 * GB
# A driver may count a little less than a card is sold with.
SAME_SIZE = 0.98
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


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
    mode: str = "Default"
    """Its compute mode."""

    def is_called(self, name: str) -> bool:
        """Return whether CUDA_VISIBLE_DEVICES means this GPU by a name: its number, or a beginning
        of its UUID."""
        name = name.strip()
        return name == self.name or (name.startswith("GPU-") and self.uuid.startswith(name))


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
    columns = "index,uuid,memory.total,memory.used,compute_mode"
    listing = nvidia_driver.answer(f"--query-gpu={columns}", "--format=csv,noheader,nounits")
    gpus = [gpu for gpu in parsed(listing) if names is None or any(map(gpu.is_called, names))]
    return Machine(tuple(gpus), min(psutil.virtual_memory().available, left_by_groups(_CONTROL_GROUPS, _own_group())))


def parsed(listing: str) -> Iterator[Gpu]:
    """Yield the GPUs of nvidia-smi's answer; a line of a lost or a sharing (MIG) GPU says nothing."""
    for line in listing.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and all(cell.isdecimal() for cell in cells[2:4]):
            yield Gpu(cells[0], cells[1], int(cells[2]) * MIB, int(cells[3]) * MIB, cells[4])


def _own_group() -> str:
    """Return the path of this process's control group (a container's, a Slurm job's)."""
    try:
        return Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].strip("/")
    except OSError:
        return ""


def left_by_groups(root: Path, own: str) -> float:
    """Return the bytes that a control group and those above it still allow."""
    folder = root / own
    return min(map(_left_in, [folder, *folder.parents]))


def _left_in(folder: Path) -> float:
    """Return the bytes that a control group leaves; infinity without a limit."""
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return math.inf


def shared_gpu_faults(config: Config, machine: Machine) -> Iterator[str]:
    """Yield mistakes about GPUs that trainer and servers share, and about the memory that what
    leaves them is parked in. Without GPUs nothing is pinned."""
    if not shares_gpus(config) or not machine.gpus:
        return
    size = config.trainer.gpu_memory_gb
    for gpu in machine.gpus:
        if gpu.memory < SAME_SIZE * size * GB:
            yield (
                f"trainer.gpu_memory_gb is {size:g}, but GPU {gpu.name} has {gpu.memory / GB:.1f} GB; set it to "
                f"{gpu.memory // GB} or less, and read the plan again."
            )
        elif gpu.used > OF_NOBODY and gpu.memory - gpu.used < size * GB:
            yield (
                f"GPU {gpu.name} has {gpu.used / GB:.1f} of {gpu.memory / GB:.1f} GB in use by other processes, too "
                f"much for trainer.gpu_memory_gb {size:g} with actor_rollout_ref.hybrid_engine true; end them "
                f"(nvidia-smi shows them), set it to {(gpu.memory - gpu.used) // GB} or less, or choose another GPU "
                f"by CUDA_VISIBLE_DEVICES."
            )
        if gpu.mode.startswith("Exclusive"):
            yield (
                f"GPU {gpu.name} is in compute mode {gpu.mode}, but with actor_rollout_ref.hybrid_engine true "
                f"trainer and server use it together; set the mode by `nvidia-smi -c 0` (as root), or set "
                f"hybrid_engine to false."
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
