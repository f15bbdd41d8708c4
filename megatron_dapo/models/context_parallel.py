"""The cut of a packed micro-batch over context-parallel ranks, and the way back.

Megatron's convention: each segment lies in 2 x CP chunks of one length. Rank r has chunks r and 2
CP - 1 - r. Early tokens attend to few others and late ones to many, so each rank gets one chunk of
either kind. Transformer Engine's ring attention expects the same (its
`thd_get_partitioned_indices`).

A micro-batch is whole on every rank before the model and after it. Its tensors are cut on their way
in, and the heads' answers are joined again: no other code knows of the cut.
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.kernels.fused_head import HeadLoss
from megatron_dapo.kernels.row_plan import to_device
from megatron_dapo.models.log_prob_head import HeadTask, LossTask, Scores, at_rows

Task = TypeVar("Task", bound=HeadTask)


def rank_places(widths: tuple[int, ...], rank: int, size: int) -> np.ndarray:
    """Return [T / size] int64: ascending places in the row of a context-parallel rank's tokens.

    widths: of the segments, each a multiple of 2 x size.
    """
    parts = []
    for start, end in pairwise([0, *accumulate(widths)]):
        chunk, rest = divmod(end - start, 2 * size)
        assert rest == 0, f"a segment of {end - start} tokens cannot be cut into {2 * size} chunks"
        for number in (rank, 2 * size - 1 - rank):
            parts.append(np.arange(start + number * chunk, start + (number + 1) * chunk))
    return np.concatenate(parts)


# The layers of a model ask one after the other; in a pipeline, a few micro-batches take turns.
@lru_cache(maxsize=16)
def _cut(
    widths: tuple[int, ...], rank: int, size: int, device: torch.device
) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
    """Return a rank's `ContextCut.places`, `owners`, `on_device` and `order`."""
    by_rank = [rank_places(widths, each, size) for each in range(size)]
    own = by_rank[rank]
    order = np.concatenate(by_rank).argsort()
    return own, order // len(own), to_device(own, device), to_device(order, device)


@dataclass(frozen=True, eq=False)
class ContextCut:
    """The tokens of a packed row [T] on this rank of the group."""

    group: dist.ProcessGroup
    places: np.ndarray
    """[T / CP], of this rank's tokens, on the host."""
    owners: np.ndarray
    """[T], the rank of each token of the row, on the host."""
    on_device: Tensor
    """`places` on the device."""
    order: Tensor
    """[T], on the device: each token's place in the ranks' parts, laid one after the other."""

    @classmethod
    def make(cls, widths: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> "ContextCut":
        """Return the cut of a row with segments of these widths, each a multiple of 2 x CP."""
        return cls(group, *_cut(widths, group.rank(), group.size(), device))

    def part(self, values: Tensor) -> Tensor:
        """Return this rank's part [1, T / CP] of [1, T]."""
        return values.index_select(1, self.on_device)

    def task(self, task: Task) -> Task:
        """Return the same task about this rank's tokens, for its head.

        A count is of the whole micro-batch: the rank with the first counted row has it, the others
        have 0. A head without rows asks for no loss, and would lose the count.
        """
        counted = np.zeros(task.targets_BS.size(1), dtype=bool)
        counted[task.counted_rows] = True
        changes: dict[str, Any] = dict(
            targets_BS=self.part(task.targets_BS), counted_rows=np.flatnonzero(counted[self.places])
        )
        if isinstance(task, LossTask):
            values = {field.name: getattr(task.tokens, field.name) for field in fields(task.tokens)}
            per_token = {name: self.part(v) for name, v in values.items() if isinstance(v, Tensor) and v.dim()}
            counts = len(task.counted_rows) > 0 and self.owners[task.counted_rows[0]] == self.group.rank()
            count = task.tokens.count if counts else torch.zeros_like(task.tokens.count)
            changes["tokens"] = replace(task.tokens, **per_token, count=count)
        return replace(task, **changes)

    def once(self, number: Tensor) -> Tensor:
        """Return a number shared by all ranks such that a sum over them contains it once."""
        return number if self.group.rank() == 0 else torch.zeros_like(number)

    def answer(self, answer: Any, asked: HeadTask | None) -> Any:
        """Return all heads' answer about the whole micro-batch, the same on all ranks. Collective.

        Only the inputs of a loss have a gradient. The gradient of whole log-probs or values is of
        this rank's tokens only, so each rank sends its part of one loss backward. A loss computed
        by a head is of the head's own tokens.

        asked: about the whole micro-batch. If the heads sum its loss, log-probs are joined only for
        the comparison on older weights' tokens.
        """
        if isinstance(answer, Tensor):
            return self.whole(answer)
        if isinstance(answer, Scores):
            full_kl = None if answer.full_kl is None else self.whole(answer.full_kl)
            entropy = None if answer.entropy is None else self.whole(answer.entropy)
            return replace(answer, log_probs=self.whole(answer.log_probs), full_kl=full_kl, entropy=entropy)
        assert isinstance(answer, HeadLoss) and isinstance(asked, LossTask)
        return self._loss(answer, asked)

    def _loss(self, answer: HeadLoss, asked: LossTask) -> HeadLoss:
        sums = torch.cat([answer.sums.flatten(), answer.count.double().view(1)])
        maxima = answer.maxima.clone()
        dist.all_reduce(sums, group=self.group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.group)
        log_probs = self._at_counted_rows(answer.log_probs, asked.counted_rows) if asked.loss.report_stale else None
        count, sums = sums[-1].to(answer.count.dtype), sums[:-1].view_as(answer.sums)
        return HeadLoss(answer.loss_sum, log_probs, None, count, sums, maxima)

    def _at_counted_rows(self, values: Tensor | None, counted_rows: np.ndarray) -> Tensor:
        """Return [N], of the micro-batch's counted rows, from each rank's [K]. Collective."""
        assert values is not None, "a head answers with the log-probs of its rows"
        counted = np.zeros(len(self.order), dtype=bool)
        counted[counted_rows] = True
        own = to_device(np.flatnonzero(counted[self.places]), values.device)
        row = self.whole(at_rows(values, own, torch.Size((1, len(self.places)))))
        return row[0, to_device(counted_rows, values.device)]

    def whole(self, values: Tensor) -> Tensor:
        """Return [1, T] from every rank's [1, T / CP]; only this rank's tokens have a gradient.

        Collective.
        """
        parts = values.new_empty(len(self.order))
        dist.all_gather_into_tensor(parts, values.detach().reshape(-1).contiguous(), group=self.group)
        row = parts.index_select(0, self.order)
        return (row.index_copy(0, self.on_device, values[0]) if values.requires_grad else row)[None]
