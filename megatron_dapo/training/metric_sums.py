"""Metric sums of micro-batches, stacked into tensors that one reduction over the ranks adds up."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.algorithms.metrics import Sums, finalize, stack_sums, unstack_maxima, unstack_sums
from megatron_dapo.platform.device import device
from megatron_dapo.platform.parallel import ParallelLayout


class MetricSums(NamedTuple):
    """Metric sums [K, 2] and maxima [M], float64 on the device, and their names."""

    sum_names: tuple[str, ...]
    max_names: tuple[str, ...]
    sums: Tensor
    maxima: Tensor

    @classmethod
    def merge(cls, parts: "Sequence[MetricSums | None]") -> "MetricSums | None":
        """Add several parts up, name by name; None without any."""
        present = [part for part in parts if part is not None]
        if not present:
            return None
        sum_names = _union(part.sum_names for part in present)
        max_names = _union(part.max_names for part in present)
        aligned = [part.aligned(sum_names, max_names) for part in present]
        sums = torch.stack([part.sums for part in aligned]).sum(0)
        maxima = torch.stack([part.maxima for part in aligned]).amax(0)
        return cls(sum_names, max_names, sums, maxima)

    @classmethod
    def all_reduce(cls, part: "MetricSums | None", layout: ParallelLayout) -> "MetricSums":
        """Add the parts of all ranks up, each token once.

        Of every data-parallel rank one rank of the last stage contributes. Collective over all
        ranks, and the same on all of them.
        """
        if part is None or not layout.counts_tokens:
            none = torch.zeros(0, dtype=torch.float64, device=device())
            part = cls((), (), none.view(0, 2), none)
        names = layout.gather((part.sum_names, part.max_names))
        total = part.aligned(_union(sums for sums, _ in names), _union(maxima for _, maxima in names))
        dist.all_reduce(total.sums)
        dist.all_reduce(total.maxima, op=dist.ReduceOp.MAX)
        return total

    def aligned(self, sum_names: tuple[str, ...], max_names: tuple[str, ...]) -> "MetricSums":
        """Return the same with rows for all of these names, zeros for missing ones."""
        if (sum_names, max_names) == (self.sum_names, self.max_names):
            return self
        sums = self.sums.new_zeros(len(sum_names), 2)
        maxima = self.maxima.new_zeros(len(max_names))
        for row, name in enumerate(self.sum_names):
            sums[sum_names.index(name)] = self.sums[row]
        for row, name in enumerate(self.max_names):
            maxima[max_names.index(name)] = self.maxima[row]
        return MetricSums(sum_names, max_names, sums, maxima)

    def with_sums(self, added: Sums) -> "MetricSums":
        """Return the same with sums of other names added."""
        rows = stack_sums(added, tuple(added), self.sums.device)
        return self._replace(sum_names=(*self.sum_names, *added), sums=torch.cat([self.sums, rows]))

    def means(self) -> dict[str, float]:
        """Return means and maxima by name."""
        sums = unstack_sums(self.sums.cpu(), self.sum_names)
        return finalize(sums, unstack_maxima(self.maxima.cpu(), self.max_names))


def _union(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return every name once, in order of first occurrence."""
    return tuple(dict.fromkeys(name for part in names for name in part))
