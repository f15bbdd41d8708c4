"""python -m launch.preflight.gpu_probe NUM: computes something on each of the first NUM GPUs, and
imports Transformer Engine, which its last line describes as JSON.

A separate process: a used CUDA can neither be forked nor given back, and a broken GPU may never
answer.
"""

import json
import os
import sys
from dataclasses import asdict

from megatron_dapo.common.child_environment import set_rank_defaults
from megatron_dapo.platform import transformer_engine


def main(num_gpus: int) -> int:
    """Return the exit code: 0, or 1 after one line per GPU that fails."""
    # before torch is imported, like a rank: they decide the version of cuDNN
    set_rank_defaults(os.environ)
    faults = [f"GPU {index}: {fault}" for index in range(num_gpus) if (fault := _fault_of(index))]
    print("\n".join(faults), flush=True)
    if faults:
        return 1
    print(json.dumps(asdict(transformer_engine.look())))
    return 0


def _fault_of(index: int) -> str | None:
    import torch

    try:
        total = (torch.ones(8, device=f"cuda:{index}") + 1).sum().item()
    except (RuntimeError, AssertionError) as error:  # the latter: a torch without CUDA
        return str(error).partition("\n")[0]
    return None if total == 16 else f"1 + 1, summed eight times, is {total:g} there"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
