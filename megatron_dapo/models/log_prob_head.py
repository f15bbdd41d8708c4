"""The head that answers with log-probabilities: takes the place of Megatron's `output_layer`, keeps its parameter.

GPTModel hands its output layer the last hidden states and returns what comes back, transposed to [B, S, ...]. Given the
targets beforehand, the head returns one log-prob (and entropy) per position instead of V logits, or the loss itself,
computed only where the mask counts. One head serves the old, the reference and the training pass.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss, metric_names
from megatron_dapo.algorithms.metrics import stack_maxima, stack_sums
from megatron_dapo.kernels.full_kl import linear_full_kl
from megatron_dapo.kernels.fused_head import (
    Head,
    HeadLoss,
    Reference,
    fused_dapo_head,
    gathered_rows,
    head_full_kl,
    head_log_probs,
)
from megatron_dapo.kernels.linear_logprob import linear_logprob_entropy
from megatron_dapo.kernels.row_plan import RowPlan, to_device


@dataclass(frozen=True, eq=False)
class HeadTask:
    """What the head is to answer for the next micro-batch.

    targets_BS: [B, S] int64, the next token of each position. counted_rows: [N] ascending positions s * B + b where an
    answer is wanted. tokens (fields [B, S]) and loss: then the answer is the loss. reference: what a KL over the whole
    vocabulary is measured to, where it is wanted. keep_hidden: to be such a reference for another model.
    """

    targets_BS: Tensor
    counted_rows: np.ndarray
    temperature: float = 1.0
    tokens: TokenBatch | None = None
    loss: LossConfig | None = None
    reference: Reference | None = None
    keep_hidden: bool = False


class LogProbHead(torch.nn.Module):
    """Set `task`, run the model. Its output is [B, S, 2] float32 (log-prob; KL to the task's reference),
    0 where nothing was asked; with a loss it is the summed loss, [1, 1, 1], and `result` has the metrics. `kept`: what
    the task wanted kept."""

    def __init__(self, output_layer: ColumnParallelLinear, vocab_size: int, chunk_size: int, fused: bool) -> None:
        super().__init__()
        self.weight = output_layer.weight  # None where the embedding on the same stage is used
        self.sequence_parallel = output_layer.sequence_parallel
        self._linear = (output_layer,)  # in a tuple: not a submodule, its parameter has one name only
        self._vocab_size = vocab_size
        self._chunk_size = chunk_size
        self.is_fused = fused
        self.task: HeadTask | None = None
        self.result: HeadLoss | None = None
        self.kept: Reference | None = None

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output=None) -> tuple[Tensor, None]:
        """hidden: [S (/ tp with sequence parallelism), B, H]. Returns ([S, B, 2] or [1, 1, 1] float32, no bias)."""
        task, self.task = self.task, None
        assert task is not None, "the log-prob head was run without a task"
        weight = self.weight if weight is None else weight
        rows = to_device(task.counted_rows, hidden.device)
        if task.loss is not None:
            self.result = self._loss(hidden, weight, task, rows)
            return self.result.loss_sum.view(1, 1, 1), None
        if task.keep_hidden:
            kept = self._plan(hidden, task).kept_rows(hidden.detach().flatten(0, 1))
            self.kept = Reference(kept, weight.detach())
        log_prob, other = self._scores(hidden, weight, task, rows)
        answers = torch.stack([log_prob, torch.zeros_like(log_prob) if other is None else other], dim=-1)
        out = answers.new_zeros((task.targets_BS.numel(), 2)).index_copy(0, rows, answers)
        return out.view(*task.targets_BS.t().shape, 2), None

    def _loss(self, hidden: Tensor, weight: Tensor, task: HeadTask, rows: Tensor) -> HeadLoss:
        values = {field.name: getattr(task.tokens, field.name) for field in fields(task.tokens)}
        per_token = {k: _in_order(v) for k, v in values.items() if isinstance(v, Tensor) and v.dim()}
        tokens = replace(task.tokens, **per_token).select(rows)
        if self.is_fused:
            targets = _in_order(task.targets_BS)[rows]
            plan, head = self._plan(hidden, task), self._head(weight, task)
            given = hidden.flatten(0, 1), targets, plan, tokens, task.loss, head
            return fused_dapo_head(*given, reference=task.reference)
        outputs = self._composed(hidden, weight, task, rows, task.loss.report_entropy, task.loss.use_full_kl)
        log_prob, entropy = outputs.log_probs, outputs.entropy
        loss_sum, sums, maxima = dapo_loss(outputs, tokens, task.loss)
        sum_names, max_names = metric_names(task.loss)
        device = log_prob.device
        stacked = stack_sums(sums, sum_names, device), stack_maxima(maxima, max_names, device)
        return HeadLoss(loss_sum, log_prob.detach(), None if entropy is None else entropy.detach(), *stacked)

    def _scores(self, hidden: Tensor, weight: Tensor, task: HeadTask, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """(log-prob [N], KL [N] where the task has a reference) of the counted rows; no gradient if fused."""
        if not self.is_fused:
            outputs = self._composed(hidden, weight, task, rows, False, task.reference is not None)
            return outputs.log_probs, outputs.kl
        assert not torch.is_grad_enabled(), "the fused head gives log-probs without gradient only"
        given = hidden.flatten(0, 1), _in_order(task.targets_BS)[rows], self._plan(hidden, task)
        head = self._head(weight, task)
        if task.reference is not None:
            return head_full_kl(*given, head, task.reference)
        return head_log_probs(*given, head)

    def _composed(
        self, hidden: Tensor, weight: Tensor, task: HeadTask, rows: Tensor, want_entropy: bool, want_kl: bool
    ) -> TokenOutputs:
        """Of the counted rows [N], with gradient: from torch operations, all of them on every rank."""
        group = self._linear[0].tp_group
        plan = self._plan(hidden, task).counted_alone() if want_kl else None
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=group)  # backward: reduce-scatter
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)  # backward: all-reduce
        hidden = hidden.flatten(0, 1).index_select(0, rows)
        settings = {
            "temperature": task.temperature,
            "num_valid_columns": self._vocab_size,
            "chunk_size": self._chunk_size,
            "group": group,
            "use_triton": False,
        }
        targets = _in_order(task.targets_BS)[rows]
        log_prob, entropy = linear_logprob_entropy(hidden, weight, targets, want_entropy=want_entropy, **settings)
        if not want_kl:
            return TokenOutputs(log_prob, entropy)
        its_rows = gathered_rows(task.reference.hidden_KH, plan)
        kl = linear_full_kl(hidden, weight, its_rows, task.reference.weight_VH, **settings)
        return TokenOutputs(log_prob, entropy, kl)

    def _plan(self, hidden: Tensor, task: HeadTask) -> RowPlan:
        group = self._linear[0].tp_group if self.sequence_parallel else None
        return RowPlan.make(
            task.counted_rows, task.targets_BS.numel(), self._chunk_size, device=hidden.device, group=group
        )

    def _head(self, weight: Tensor, task: HeadTask) -> Head:
        return Head(weight, self._linear[0].tp_group, self._vocab_size, task.temperature)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets=(), metadata=None):
        return self._linear[0].sharded_state_dict(prefix, sharded_offsets, metadata)


def _in_order(values_BS: Tensor) -> Tensor:
    """[B, S] as [S * B], the order of Megatron's hidden states."""
    return values_BS.t().reshape(-1)
