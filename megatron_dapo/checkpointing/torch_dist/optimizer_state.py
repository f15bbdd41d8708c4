"""One view of Megatron's optimizers, sharded over data-parallel ranks or not, of torch's Adam and of fused ones.

Megatron's own distributed optimizer cannot load into torch's Adam, which keeps the number of steps per parameter and is
what Megatron uses where neither Transformer Engine nor apex is installed; and it gathers all states before it saves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class Slot:
    """What the optimizer keeps of elements [first, first + numel) of a model parameter.

    main: the values it updates, fp32. sharded: the other data-parallel ranks have the other elements; else they have
    the same.
    """

    parameter: torch.nn.Parameter
    main: Tensor
    first: int
    sharded: bool
    inner: torch.optim.Optimizer

    def tensors(self) -> dict[str, Tensor]:
        """Return name -> flat view; `fp32_param` only where it is not the parameter itself.

        All are there before the first step too.
        """
        state = self._initialized()
        values = {name: state[name] for name in MOMENTS}
        if self.main.dtype != self.parameter.dtype:
            values["fp32_param"] = self.main
        return {name: value.detach().view(-1) for name, value in values.items()}

    def _initialized(self) -> dict[str, Any]:
        state = self.inner.state[self.main]
        if "exp_avg" not in state:
            state.update({name: torch.zeros_like(self.main.detach()) for name in MOMENTS})
            if isinstance(self.inner, torch.optim.Adam):
                state["step"] = torch.tensor(0.0)
        return state

    @property
    def num_steps(self) -> int:
        """Return how many steps the optimizer has done."""
        state = self._initialized()
        if "step" in state:
            return int(state["step"])
        return max(int(group.get("step", 0)) for group in self.inner.param_groups)

    def set_num_steps(self, num_steps: int) -> None:
        """Set the count: torch's Adam has one per parameter, in a tensor of its own; fused ones have one per group."""
        state = self._initialized()
        if "step" in state:
            state["step"] = torch.full_like(state["step"], num_steps)
        elif num_steps:  # a group that has never stepped has no count
            for group in self.inner.param_groups:
                group["step"] = num_steps


def slots(optimizer: MegatronOptimizer) -> Iterator[Slot]:
    """Yield the slot of every parameter that this rank's part of the optimizer updates, in a fixed order."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            yield from _sharded_slots(part)
        else:
            yield from _whole_slots(part)


def _sharded_slots(part: DistributedOptimizer) -> Iterator[Slot]:
    buckets = (bucket for ranges in part.gbuf_ranges for of_dtype in ranges.values() for bucket in of_dtype)
    for bucket in buckets:
        for parameter, ranges in bucket["param_map"].items():
            group, index = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][index]
            yield Slot(parameter, main, ranges["param"].start, True, part.optimizer)


def _whole_slots(part: MegatronOptimizer) -> Iterator[Slot]:
    model_parameter: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    half_groups = getattr(part, "float16_groups", [])
    full_groups = getattr(part, "fp32_from_float16_groups", [])
    for half, full in zip(half_groups, full_groups, strict=True):
        model_parameter |= dict(zip(full, half, strict=True))
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            yield Slot(model_parameter.get(main, main), main, 0, False, part.optimizer)
