"""The one place that knows the device: GPU with NCCL, or CPU with gloo."""

import logging
import os
import warnings

import torch


def is_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """This process's device. Under a launcher each local rank owns one GPU."""
    if not is_gpu():
        return torch.device("cpu")
    # a launcher that shows each process its own GPU alone (`srun --gpus-per-task=1`) leaves no other number than 0
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.device_count() > 1 else 0)


def collective_backend() -> str:
    return "nccl" if is_gpu() else "gloo"


def model_dtype(name: str) -> torch.dtype:
    """Parameter dtype of a config's `auto | bfloat16 | float32`; auto is bfloat16 on GPU and float32 on CPU.

    CPUs without bf16 units multiply bf16 matrices more than twice as slowly as fp32 ones.
    """
    if name == "auto":
        return torch.bfloat16 if is_gpu() else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def prepare_megatron() -> None:
    """Make `import megatron.core` work on this machine; must run before that import. Does nothing the second time."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if is_gpu():
        return
    # megatron.core warns once per absent CUDA extension (Transformer Engine, apex ...): none can exist here
    warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
    # and it imports this, which says in every process what is known: a CUDA build of torch and a toolkit, but no GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from megatron_dapo.platform import megatron_cpu

    megatron_cpu.apply()
