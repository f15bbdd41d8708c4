"""Run on every rank: rank 0 hands out bytes at several layouts, and brings a batch it cannot cut.

Argument: the file for rank 0's results. By layout and rank it holds the bytes received, the rank's
place, the number of bytes sent to single ranks, and the error.
"""

import sys
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rank_coordinates import RankCoordinates
from megatron_dapo.config.loader import load_config
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.huggingface.spec_reader import model_spec
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.distribute import StepDistributor
from tests.distributed.process_groups import leave
from tests.synthetic import synthetic_groups

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
    coordinates = RankCoordinates(dp=layout.dp_rank, pp=layout.pp_rank, tp=layout.tp_rank, cp=layout.cp_rank)
    return {"coordinates": coordinates, "got": got.tolist(), "num_sent": num_sent}


def refusal(layout: ParallelLayout) -> list[str]:
    """This rank's error if rank 0 has samples over the cap: its kind and its sentence."""
    cap = "actor_rollout_ref.actor.max_tokens_per_microbatch=8"
    config = load_config(None, ["actor_rollout_ref.model.path=unused", cap])
    distribute = StepDistributor(config, layout, model_spec(model_json_named("qwen2.5-0.5b"), ""))
    groups = synthetic_groups(64, num_groups=1) if layout.rank == 0 else None
    try:
        distribute(7, groups)
    except UserError as error:
        return [type(error).__name__, str(error)]
    return []


def main(path: str) -> None:
    answers = {}
    for name, sizes in LAYOUTS.items():
        layout = ParallelLayout.initialize(**sizes)
        # first: the hand-out after it shows that all ranks are at the same point
        refused = refusal(layout)
        answers[name] = layout.gather(handed_out(layout) | {"refused": refused}), layout.replicas
        leave(layout)
    if dist.get_rank() == 0:
        torch.save(answers, path)
    ParallelLayout.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
