"""The metrics of a mixture's load: how evenly an update's tokens were spread over the experts."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.models.build import ModelParts

LOAD_METRICS = ("actor/expert_load_max", "actor/expert_load_entropy", "actor/expert_dropped")


def expert_load_metrics(model: ModelParts, device: torch.device) -> dict[str, float]:
    """Return the metrics of the counts since the last reset, over the tokens of all ranks.
    Collective over all ranks, each with its layers and tokens."""
    moe = model.spec.moe
    assert moe is not None, "the model has experts"
    counts = torch.zeros(model.spec.num_layers, moe.num_experts + 1, dtype=torch.float64, device=device)
    first = 0
    for chunk in model.chunks:
        load = chunk.expert_load
        assert load is not None, "models/build.py counts the load of every mixture"
        if load.counts is not None:
            counts[list(model.routed_layers[first : first + load.num_layers])] += load.counts
        first += load.num_layers
    dist.all_reduce(counts)
    return load_metrics(counts[moe.num_dense_layers :])


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Return the metrics of [layers, experts + 1] counts (`ChunkLoad.counts`).

    load_max: tokens of the busiest expert over the mean, in the most uneven layer. load_entropy:
    entropy of the experts' shares of the tokens, over that of equal shares, mean over the layers.
    dropped: share of the choices that no expert computed.
    """
    loads, wanted = counts[:, :-1].double(), counts[:, -1].double()
    shares = loads / loads.sum(1, keepdim=True).clamp(min=1)
    entropy = -torch.special.xlogy(shares, shares).sum(1) / math.log(loads.size(1))
    dropped = 1 - loads.sum() / wanted.sum().clamp(min=1)
    values = torch.stack([(shares * loads.size(1)).max(), entropy.mean(), dropped]).tolist()
    return dict(zip(LOAD_METRICS, values, strict=True))
