"""One view of Megatron's optimizers, sharded over data-parallel ranks or not, of torch's Adam and
of fused ones.

Megatron's own distributed optimizer cannot load into torch's Adam, which keeps the number of steps
per parameter. Megatron uses that without Transformer Engine and apex. It also gathers all states
before it saves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class Slot:
    """The optimizer's state of elements [first, first + numel) of a model parameter."""

    parameter: torch.nn.Parameter
    main: Tensor
    """The updated values: fp32, or the parameter's own if the optimizer keeps the fp32 ones."""
    inner: torch.optim.Optimizer
    """The optimizer that updates them."""
    first: int
    sharded: bool
    """Whether the other data-parallel ranks have the other elements; else they have the same."""

    def tensors(self) -> dict[str, Tensor]:
        """Return name -> flat view; `fp32_param` only if it is not the parameter itself.

        All exist before the first step too.
        """
        state = self._initialized()
        values = {name: state[name] for name in MOMENTS}
        main = state.get("master_param", self.main)
        if main.dtype != self.parameter.dtype:
            values["fp32_param"] = main
        return {name: value.detach().view(-1) for name, value in values.items()}

    def _initialized(self) -> dict[str, Any]:
        state = self.inner.state[self.main]
        if "exp_avg" not in state and getattr(self.inner, "master_weights", False):
            # Transformer Engine's Adam
            self.inner.initialize_state(self.main, store_param_remainders=False)  # type: ignore[attr-defined]
        if "exp_avg" not in state:
            state.update({name: torch.zeros_like(self.main.detach()) for name in MOMENTS})
            if isinstance(self.inner, torch.optim.Adam):
                is_fused = self.inner.param_groups[0].get("fused")
                state["step"] = torch.zeros((), device=self.main.device if is_fused else "cpu")
        return state

    @property
    def num_steps(self) -> int:
        """Return the number of steps done by the optimizer."""
        state = self._initialized()
        if "step" in state:
            return int(state["step"])
        return max(int(group.get("step", 0)) for group in self.inner.param_groups)

    def set_num_steps(self, num_steps: int) -> None:
        """Set the count: torch's Adam has one per parameter, in a separate tensor; fused ones have
        one per group."""
        state = self._initialized()
        if "step" in state:
            state["step"] = torch.full_like(state["step"], num_steps)
        elif num_steps:  # a group that has never stepped has no count
            for group in self.inner.param_groups:
                group["step"] = num_steps


def slots(optimizer: MegatronOptimizer) -> Iterator[Slot]:
    """Yield the slot of every parameter that this rank's part of the optimizer updates, in a fixed
    order."""
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
            yield Slot(parameter, *_updated(part.optimizer, main), first=ranges["param"].start, sharded=True)


def _updated(optimizer: torch.optim.Optimizer, main: Tensor) -> tuple[Tensor, torch.optim.Optimizer]:
    """Return the updated tensor of an optimizer's parameter, and the optimizer that updates it.

    An optimizer with a part of its state in host memory has two inner optimizers. One has float32
    copies of that part, the other of the rest.
    """
    if not isinstance(optimizer, HybridDeviceOptimizer):
        return main, optimizer
    copy = optimizer.param_to_inner_param[main]
    groups = ((inner, group) for inner in optimizer.sub_optimizers for group in inner.param_groups)
    return copy, next(inner for inner, group in groups if any(each is copy for each in group["params"]))


def _whole_slots(part: MegatronOptimizer) -> Iterator[Slot]:
    model_parameter: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    half_groups = getattr(part, "float16_groups", [])
    full_groups = getattr(part, "fp32_from_float16_groups", [])
    for half, full in zip(half_groups, full_groups, strict=True):
        model_parameter |= dict(zip(full, half, strict=True))
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            yield Slot(model_parameter.get(main, main), main, part.optimizer, first=0, sharded=False)
