"""How the log-prob head is built: fused where the kernels pass their check."""

import logging

import torch
import torch.distributed as dist

from megatron_dapo.config import ActorConfig
from megatron_dapo.kernels import largest_error
from megatron_dapo.platform import ParallelLayout, device, is_gpu, model_dtype

log = logging.getLogger(__name__)


def head_options(actor: ActorConfig, layout: ParallelLayout) -> dict:
    """Keyword arguments of `build_model`. Collective over all ranks: one rank's doubt turns the fused head off."""
    chunk_size = actor.log_prob_chunk_size or (4096 if is_gpu() else 1024)
    return {"head_chunk_size": chunk_size, "fused_head": _use_fused_head(actor, layout)}


def _use_fused_head(actor: ActorConfig, layout: ParallelLayout) -> bool:
    if actor.fused_kernels == "off":
        return False
    dtype = model_dtype(actor.megatron.dtype)
    try:
        errors = largest_error(device(), dtype)
        wrong = [e for e in errors if not e.error <= e.bound]  # NaN is wrong too
        problem = ", ".join(f"{e.name} off by {e.error:.1e}, allowed {e.bound:.1e}" for e in wrong)
    except Exception as error:  # a compiler, a driver, a kernel: whatever fails here, training can go on without it
        problem = f"{type(error).__name__}: {error}"
    verdict = torch.tensor([0.0 if problem else 1.0], device=device())
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    if problem:
        log.warning(
            "THE FUSED KERNELS ARE OFF: on rank %d their check against float64 failed (%s). Training goes on with the "
            "composed head, more slowly; actor_rollout_ref.actor.fused_kernels=off silences this.",
            layout.rank,
            problem,
        )
    return bool(verdict.item())
