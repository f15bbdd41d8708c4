"""Run on every rank: rank 0 hands out bytes at several layouts. Argument: the file that rank 0 saves to, by layout,
what every rank got, where it is, and how many bytes it sent to single ranks."""

import sys
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from megatron_dapo.platform.parallel import ParallelLayout
from tests.distributed.process_groups import leave

LAYOUTS = {"tp2_dp2": {"tp": 2}, "pp2_dp2": {"pp": 2}, "tp2_pp2": {"tp": 2, "pp": 2}, "dp4": {}}


def part_of(dp_rank: int) -> np.ndarray:
    """Of other bytes and another length for each data-parallel rank; one of nothing."""
    return np.full(1000 * dp_rank, dp_rank, dtype=np.uint8)


def handed_out(layout: ParallelLayout) -> dict:
    num_sent = 0

    def counted(tensor: torch.Tensor, *args, **kwargs):
        nonlocal num_sent
        num_sent += tensor.numel()
        return isend(tensor, *args, **kwargs)

    isend = dist.isend
    with patch.object(dist, "isend", counted):
        parts = [part_of(dp_rank) for dp_rank in range(layout.dp)] if layout.rank == 0 else None
        got = layout.hand_out(parts)
    return {"coordinates": layout.coordinates(), "got": got.tolist(), "num_sent": num_sent}


def main(path: str) -> None:
    answers = {}
    for name, sizes in LAYOUTS.items():
        layout = ParallelLayout.initialize(**sizes)
        answers[name] = layout.gather(handed_out(layout)), layout.replicas
        leave(layout)
    if dist.get_rank() == 0:
        torch.save(answers, path)
    ParallelLayout.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
