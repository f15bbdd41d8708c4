"""Runs micro-batches through a model on Megatron's pipeline schedules, and takes answers from its head."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.kernels.fused_head import Reference
from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.log_prob_head import HeadTask
from megatron_dapo.platform import watchdog
from megatron_dapo.platform.parallel import ParallelLayout


def packed_seq_params(batch: MicroBatch) -> PackedSeqParams | None:
    """Megatron's description of the packing; None for a padded rectangle."""
    if not batch.is_packed:
        return None
    offsets, longest = batch.cu_seqlens, batch.max_seqlen
    return PackedSeqParams("thd", offsets, offsets, max_seqlen_q=longest, max_seqlen_kv=longest)


class MetricSums(NamedTuple):
    """Metric sums [K, 2] and maxima [M], float64 on the device, in the order of `metric_names`."""

    sums: Tensor
    maxima: Tensor

    @classmethod
    def zeros(cls, num_sums: int, num_maxima: int, device: torch.device) -> "MetricSums":
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in ((num_sums, 2), num_maxima)))

    @classmethod
    def together(cls, parts: "Sequence[MetricSums | None]") -> "MetricSums | None":
        """Of several parts one; None where there is none."""
        parts = [part for part in parts if part is not None]
        if not parts:
            return None
        return cls(torch.stack([p.sums for p in parts]).sum(0), torch.stack([p.maxima for p in parts]).amax(0))

    @classmethod
    def over_ranks(
        cls, part: "MetricSums | None", sizes: tuple[int, int], layout: ParallelLayout, device: torch.device
    ) -> "MetricSums":
        """Each token once: the last stage's first tensor-parallel rank of every data-parallel rank contributes.

        sizes: numbers of sums and maxima. Collective over all ranks, and the same on all of them.
        """
        if part is None or layout.tp_rank != 0:
            part = cls.zeros(*sizes, device)
        dist.all_reduce(part.sums)
        dist.all_reduce(part.maxima, op=dist.ReduceOp.MAX)
        return part


class Scores(NamedTuple):
    """Of one micro-batch, [B, S] float32: the counted targets' log-probs, the KL over the whole vocabulary where it was
    asked for; and what the head kept."""

    log_probs: Tensor
    full_kl: Tensor | None
    kept: Reference | None


@dataclass(frozen=True)
class Schedule:
    """model: parts as built. stages: the same chunks as Megatron runs them (wrapped for DDP and half precision)."""

    model: ModelParts
    stages: list[torch.nn.Module]
    temperature: float

    def log_probs(self, batches: Sequence[MicroBatch]) -> list[Tensor] | None:
        """Log-prob of every counted target, [B, S] float32 per micro-batch, on the last stage; None elsewhere."""
        scores = self.scores(batches)
        return None if scores is None else [score.log_probs for score in scores]

    @torch.no_grad()
    def scores(
        self, batches: Sequence[MicroBatch], *, full_kl: bool = False, keep_hidden: bool = False
    ) -> list[Scores] | None:
        """Per micro-batch, on the last stage; None elsewhere. full_kl: to the reference whose hidden states the batches
        have. keep_hidden: the hidden states that the head met, to be such a reference."""

        def task(batch: MicroBatch) -> HeadTask:
            reference = _reference(batch) if full_kl else None
            asked = {"reference": reference, "keep_hidden": keep_hidden}
            return HeadTask(batch.targets, batch.counted_rows, self.temperature, **asked)

        def finish(answers: Tensor, batch: MicroBatch) -> Scores:
            kept, self.model.head.kept = self.model.head.kept, None
            return Scores(answers[..., 0], answers[..., 1] if full_kl else None, kept)

        answers = self._run(batches, task, finish, forward_only=True)
        return answers if self.model.head is not None else None

    def forward_backward(
        self, batches: Sequence[MicroBatch], tokens_of: Callable[[MicroBatch], TokenBatch], loss: LossConfig
    ) -> MetricSums | None:
        """Accumulates the gradient of the summed loss, divided by the global count, in the parameters' main_grad.

        Returns the metric sums of this rank's micro-batches, on the last stage; None elsewhere.
        """
        parts: list[MetricSums] = []
        counts: list[Tensor] = []

        def task(batch: MicroBatch) -> HeadTask:
            tokens = tokens_of(batch)
            counts.append(tokens.count)
            asked = {"tokens": tokens, "loss": loss, "reference": _reference(batch) if loss.use_full_kl else None}
            return HeadTask(batch.targets, batch.counted_rows, self.temperature, **asked)

        def finish(loss_sum: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, dict]:
            result, self.model.head.result = self.model.head.result, None
            parts.append(MetricSums(result.sums, result.maxima))
            # Megatron's contract with calculate_per_token_loss: (loss sum, count, nothing)
            return loss_sum.reshape(()), counts[-1].int(), {}

        self._run(batches, task, finish, forward_only=False)
        return MetricSums.together(parts)

    def _run(
        self,
        batches: Sequence[MicroBatch],
        task: Callable[[MicroBatch], HeadTask],
        finish: Callable,
        forward_only: bool,
    ) -> list:
        def give_task(batch: MicroBatch) -> None:
            if self.model.head is not None:
                self.model.head.task = task(batch)

        return run_micro_batches(self.stages, batches, finish, forward_only=forward_only, before_head=give_task)


def _reference(batch: MicroBatch) -> Reference:
    return Reference(batch.ref_hidden, batch.ref_weight)


def run_micro_batches(
    stages: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    finish: Callable[[Tensor, MicroBatch], object],
    *,
    forward_only: bool,
    before_head: Callable[[MicroBatch], None] = lambda batch: None,
) -> list:
    """What `finish(head's output, micro-batch)` returns of every micro-batch, on the last stage.

    With backward it returns Megatron's (loss sum, count, {}), and the gradient, divided by the global count, is added
    to the parameters' main_grad. before_head: called before each pass through this rank's last chunk.
    """
    for stage in stages:
        stage.train(not forward_only)

    def forward_step(iterator: Iterator[MicroBatch], stage: torch.nn.Module):
        batch = next(iterator)
        watchdog.beat()
        if stage is stages[-1]:
            before_head(batch)
        output = stage(batch.tokens, batch.position_ids, None, packed_seq_params=packed_seq_params(batch))
        return output, lambda answers, non_loss_data=False: finish(answers, batch)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in stages],
        model=list(stages),
        num_microbatches=len(batches),
        seq_length=max(batch.tokens.size(1) for batch in batches),  # stages tell each other the real one
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
