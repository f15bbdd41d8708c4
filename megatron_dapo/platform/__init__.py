"""Which device and backend this process uses, its place in the parallel layout, and the CPU adaptations.

Import from here what __all__ lists, `watchdog` for `beat` and `phase`, and `nccl`. The adaptations themselves
(`megatron_cpu`, `sglang_cpu`) are imported only where there is no GPU.
"""

from megatron_dapo.platform.device import (
    device,
    is_gpu,
    model_dtype,
    peak_memory,
    prepare_megatron,
    require_usable_gpus,
)
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.platform.ranks import JobError, Ranks, SingleRank, describe, tell, together
from megatron_dapo.platform.watchdog import Watchdog

__all__ = [
    "JobError",
    "ParallelLayout",
    "Ranks",
    "SingleRank",
    "Watchdog",
    "describe",
    "device",
    "is_gpu",
    "model_dtype",
    "peak_memory",
    "prepare_megatron",
    "require_usable_gpus",
    "tell",
    "together",
]
