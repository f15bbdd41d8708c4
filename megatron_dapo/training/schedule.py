"""Runs micro-batches through a model on Megatron's pipeline schedules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.kernels.fused_head import KLReference
from megatron_dapo.kernels.row_plan import to_device
from megatron_dapo.models.attention.segments import Packing
from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.context_parallel import ContextCut
from megatron_dapo.models.log_prob_head import LossTask, Scores, ScoreTask
from megatron_dapo.models.router_replay import router_pass
from megatron_dapo.platform import watchdog


@dataclass(frozen=True)
class Schedule:
    """Runs micro-batches through a model."""

    model: ModelParts
    """Parts as built."""
    stages: Sequence[torch.nn.Module]
    """The same chunks, wrapped for DDP and half precision."""
    temperature: float

    def log_probs(self, batches: Sequence[MicroBatch]) -> list[Tensor] | None:
        """Return the log-prob of every counted target, [B, S] float32 per micro-batch, on the last
        stage; None elsewhere."""
        scores = self.scores(batches)
        return None if scores is None else [score.log_probs for score in scores]

    @torch.no_grad()
    def scores(
        self,
        batches: Sequence[MicroBatch],
        *,
        full_kl: bool = False,
        keep_hidden: bool = False,
        record_experts: bool = False,
    ) -> list[Scores] | None:
        """Score every micro-batch without gradients.

        Args:
            batches: this rank's micro-batches.
            full_kl: also the KL to the reference with its hidden states in the batches.
            keep_hidden: keep the head's input, for use as such a reference.
            record_experts: write the routers' choice of experts into the batches, on every stage.

        Returns:
            One entry per micro-batch on the last stage; None elsewhere.
        """

        def task(batch: MicroBatch) -> ScoreTask:
            return ScoreTask(
                batch.targets,
                batch.counted_rows,
                self.temperature,
                kl_reference=kl_reference(batch) if full_kl else None,
                keep_hidden=keep_hidden,
            )

        answers = run_micro_batches(
            self.stages,
            batches,
            lambda scores, batch: scores,
            task=task,
            forward_only=True,
            record_experts=record_experts,
        )
        return answers if self.model.head is not None else None


def kl_reference(batch: MicroBatch) -> KLReference:
    """Return the reference that the micro-batch carries, for a KL over the whole vocabulary."""
    assert batch.ref_hidden is not None and batch.ref_weight is not None, "the reference has scored this batch"
    return KLReference(batch.ref_hidden, batch.ref_weight)


def run_micro_batches(
    stages: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    finish: Callable[[Any, MicroBatch], Any],
    *,
    forward_only: bool,
    task: Callable[[MicroBatch], ScoreTask | LossTask] | None = None,
    record_experts: bool = False,
) -> list:
    """Run micro-batches through the model, forward, and backward unless forward_only. Collective
    over all ranks.

    Args:
        stages: this rank's chunks, wrapped for Megatron's schedule.
        batches: this rank's micro-batches.
        finish: makes a result from the head's answer and the micro-batch; with backward, Megatron's
            (summed loss, count, result). The gradient, divided by the global count, is added to the
            parameters' main_grad.
        forward_only: without gradients.
        task: the log-prob head's task for a micro-batch; None for a critic.
        record_experts: routers write their choice of experts into micro-batches with room for them,
            and replay none.

    Returns:
        The results of the micro-batches in order, on the last stage; an empty list elsewhere.
    """
    for stage in stages:
        stage.train(not forward_only)
    has_head = get_attr_wrapped_model(stages[-1], "post_process")
    group = get_attr_wrapped_model(stages[-1], "cp_group")
    counts_load = not forward_only and get_attr_wrapped_model(stages[-1], "expert_load") is not None

    def forward_step(iterator: Iterator[MicroBatch], stage: torch.nn.Module) -> tuple[Tensor, Callable]:
        batch = next(iterator)
        watchdog.beat()
        head_task = task(batch) if task is not None and has_head and stage is stages[-1] else None
        tokens = batch.tokens
        is_token = to_device(batch.is_token(), tokens.device) if counts_load else None
        cut = None
        if group.size() > 1:
            cut = ContextCut.make(batch.widths, group, tokens.device)
            tokens = cut.part(tokens)
            is_token = None if is_token is None else cut.part(is_token)
        packed = packed_seq_params(batch, is_cut=cut is not None)
        rank_task = cut.task(head_task) if cut is not None and head_task is not None else head_task
        replay = dict(records=record_experts, has_backward=not forward_only)
        with router_pass(batch.experts, tokens.device, **replay) as routing:
            answer = stage(tokens, packed_seq_params=packed, task=rank_task, router_pass=routing, is_token=is_token)
        # Megatron wants a tensor; it passes another one of the same device to the second function
        output = answer if isinstance(answer, Tensor) else answer.log_probs

        def finished(_: Tensor, non_loss_data: bool = False) -> Any:
            if cut is None:
                return finish(answer, batch)
            result = finish(cut.answer(answer, head_task), batch)
            if forward_only:
                return result
            loss_sum, count, metrics = result
            # Megatron adds the counts up over these ranks as well
            return loss_sum, cut.once(count), metrics

        return output, finished

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in stages],
        model=list(stages),
        num_microbatches=len(batches),
        # stages tell each other the real one
        seq_length=max(batch.tokens.size(1) for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def packed_seq_params(batch: MicroBatch, *, is_cut: bool = False) -> Packing | None:
    """Return Megatron's description of the packing; None for a padded rectangle.

    Args:
        is_cut: over context-parallel ranks. The lengths are of whole segments then, too.
            Transformer Engine also asks for lengths with padding. They are equal, since no token
            attends to the padding on its right.
    """
    if batch.cu_seqlens is None:
        return None
    offsets = batch.cu_seqlens
    longest = batch.max_seqlen
    padded = dict(cu_seqlens_q_padded=offsets, cu_seqlens_kv_padded=offsets) if is_cut else {}
    bounds = tuple(accumulate(batch.widths, initial=0))
    return Packing("thd", offsets, offsets, max_seqlen_q=longest, max_seqlen_kv=longest, bounds=bounds, **padded)
