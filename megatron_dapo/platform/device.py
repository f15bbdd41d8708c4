"""The one place that knows the device: GPU with NCCL, or CPU with gloo."""

import logging
import os
import warnings

import torch

from megatron_dapo.common import nvidia_driver
from megatron_dapo.common.errors import UserError
from megatron_dapo.platform import cpu_ledger


def is_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """Return this process's device. Under a launcher each local rank owns one GPU."""
    if not is_gpu():
        return torch.device("cpu")
    # with one visible GPU per process (`srun --gpus-per-task=1`) its number is 0
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.device_count() > 1 else 0)


def require_usable_gpus() -> None:
    """Check at the start of a run that torch can use the GPUs.

    Raises:
        UserError: if the machine has NVIDIA's driver, but torch, though built for GPUs, cannot use
            them. The run would continue on the CPU, thousands of times too slow.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # the user's own wish
    if is_gpu() or torch.version.cuda is None or hidden or not nvidia_driver.is_loaded():
        return
    try:
        torch.cuda.init()
        why = "it finds none"
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
    raise UserError(
        f"This machine has an NVIDIA driver, but torch {torch.__version__} cannot use a GPU here ({why}); update the "
        "driver to one for this CUDA, ask the scheduler for GPUs, or set CUDA_VISIBLE_DEVICES= to run on the CPU."
    )


def peak_memory() -> tuple[int, int]:
    """Return the most bytes that this process's tensors took on its GPU, and the most that its
    allocator held for them, since the last call."""
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peaks


def free_bytes() -> int | None:
    """Return the bytes of this process's GPU that nobody holds.

    On a CPU they are those of its ledger (cpu_ledger.py); None without one, or without a limit.
    """
    if is_gpu():
        return torch.cuda.mem_get_info(device())[0]
    ledger = cpu_ledger.ledger_of(int(os.environ.get("LOCAL_RANK", "0")))
    return None if ledger is None else ledger.free_bytes()


def used_bytes() -> int | None:
    """Return the bytes in use on this process's GPU, by whomever; None on a CPU."""
    if not is_gpu():
        return None
    free, total = torch.cuda.mem_get_info(device())
    return total - free


def allocator_bytes() -> int | None:
    """Return the bytes of the GPU that this process's allocator holds; None on a CPU."""
    return torch.cuda.memory_reserved() if is_gpu() else None


def free_cached_memory() -> None:
    """Give the GPU back what this process's allocator keeps for later, to be used by others."""
    if is_gpu():
        torch.cuda.empty_cache()


def collective_backend() -> str:
    return "nccl" if is_gpu() else "gloo"


def model_dtype(name: str) -> torch.dtype:
    """Return the parameter dtype for a config's `auto | bfloat16 | float32`; auto is bfloat16 on
    GPU and float32 on CPU.

    CPUs without bf16 units multiply bf16 matrices more than twice as slowly as fp32 ones.
    """
    if name == "auto":
        return torch.bfloat16 if is_gpu() else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def prepare_megatron() -> None:
    """Make `import megatron.core` work on this machine; must run before that import. Does nothing
    the second time."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if is_gpu():
        return
    # megatron.core warns once per absent CUDA extension (Transformer Engine, apex ...): none can
    # exist here
    warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
    # megatron.core imports this module, which logs in every process: a CUDA build of torch and a
    # toolkit, but no GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from megatron_dapo.platform import megatron_cpu

    megatron_cpu.apply()
