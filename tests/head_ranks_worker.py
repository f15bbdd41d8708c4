"""Run under torchrun: `check_over_ranks` with and without sequence parallelism.

Arguments: cuda or cpu, a shape.
"""

import sys

import torch
import torch.distributed as dist

from megatron_dapo.platform import device as platform
from tests import kernel_checks as checks

SHAPES = {
    "small": dict(rows=60, hidden=32, vocab=91, padding=5, chunk_size=16, dtype=torch.float32),
    "32b_tp8": dict(rows=8192, hidden=5120, vocab=38016, chunk_size=4096),
    "odd": dict(rows=1502, hidden=1032, vocab=19003, padding=21, chunk_size=500),
}


def main() -> None:
    kind, shape = sys.argv[1:]
    device = platform.device() if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    case = checks.HeadCase.make(device, **SHAPES[shape])
    for sequence_parallel in (False, True):
        checks.check_over_ranks(case, dist.group.WORLD, sequence_parallel)
        print(f"rank {dist.get_rank()} agreed", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
