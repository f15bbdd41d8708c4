"""The head of log-probs: takes the place of Megatron's `output_layer` and keeps its parameter.

From the last hidden states and a task, it returns one log-prob per position instead of V logits, or
the loss itself. It computes only the counted rows. One head serves the old, the reference and the
training pass.
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
    KLReference,
    fused_dapo_head,
    gathered_rows,
    head_full_kl,
    head_log_probs,
)
from megatron_dapo.kernels.linear_logprob import linear_logprob_entropy
from megatron_dapo.kernels.row_plan import RowPlan, to_device


@dataclass(frozen=True, eq=False)
class HeadTask:
    """The common part of all tasks."""

    targets_BS: Tensor
    """[B, S] int64, the next token of each position."""
    counted_rows: np.ndarray
    """[N] ascending positions s * B + b of the wanted answers."""
    temperature: float


@dataclass(frozen=True, eq=False)
class ScoreTask(HeadTask):
    """Asks for log-probs."""

    kl_reference: KLReference | None = None
    """The other model of a KL over the whole vocabulary, if wanted."""
    keep_hidden: bool = False
    """Keep the hidden states, as such a reference for another model."""
    with_gradient: bool = False
    """Send log-probs, and a wanted entropy, backward."""
    want_entropy: bool = False


@dataclass(frozen=True, eq=False)
class LossTask(HeadTask):
    """Asks for the summed loss of `tokens`, with fields [B, S]."""

    tokens: TokenBatch
    loss: LossConfig
    kl_reference: KLReference | None = None
    """For a loss with a KL over the whole vocabulary."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The answer to a `ScoreTask`: [B, S] float32, 0 outside the counted rows."""

    log_probs: Tensor
    full_kl: Tensor | None
    """With the task's reference."""
    kept: KLReference | None
    """With the task's `keep_hidden`."""
    entropy: Tensor | None = None
    """If the task wants it."""


class LogProbHead(torch.nn.Module):
    """Megatron's output layer with another answer than logits."""

    def __init__(self, output_layer: ColumnParallelLinear, vocab_size: int, chunk_size: int, fused: bool) -> None:
        super().__init__()
        self.weight = output_layer.weight  # None if tied to the stage's embedding
        self.sequence_parallel = output_layer.sequence_parallel
        # in a tuple: not a submodule, its parameter has one name only
        self._linear = (output_layer,)
        self._vocab_size = vocab_size
        self._chunk_size = chunk_size
        self.is_fused = fused

    def forward(self, hidden: Tensor, weight: Tensor | None, task: ScoreTask | LossTask) -> Scores | HeadLoss:
        """Answer a task about hidden [S (/ tp with sequence parallelism), B, H].

        weight: of a tied embedding.
        """
        weight = self.weight if weight is None else weight
        rows = to_device(task.counted_rows, hidden.device)
        targets = _in_order(task.targets_BS)[rows]
        if isinstance(task, ScoreTask):
            return self._scores(hidden, weight, task, targets, rows)
        tokens = _in_order_of_rows(task.tokens, rows)
        if not self.is_fused:
            return self._composed_loss(hidden, weight, task, targets, rows, tokens)
        return fused_dapo_head(
            hidden.flatten(0, 1),
            targets,
            self._plan(hidden, task),
            tokens,
            task.loss,
            self._head(weight, task),
            reference=task.kl_reference,
        )

    def _composed_loss(
        self, hidden: Tensor, weight: Tensor, task: LossTask, targets: Tensor, rows: Tensor, tokens: TokenBatch
    ) -> HeadLoss:
        reference = task.kl_reference if task.loss.use_full_kl else None
        outputs = self._composed(hidden, weight, task, targets, rows, reference, want_entropy=task.loss.report_entropy)
        loss_sum, sums, maxima = dapo_loss(outputs, tokens, task.loss)
        sum_names, max_names = metric_names(task.loss)
        device = loss_sum.device
        return HeadLoss(
            loss_sum,
            outputs.log_probs.detach(),
            None if outputs.entropy is None else outputs.entropy.detach(),
            tokens.count,
            stack_sums(sums, sum_names, device),
            stack_maxima(maxima, max_names, device),
        )

    def _scores(self, hidden: Tensor, weight: Tensor, task: ScoreTask, targets: Tensor, rows: Tensor) -> Scores:
        kept = kl = entropy = None
        if task.keep_hidden:
            kept_rows = self._plan(hidden, task).kept_rows(hidden.detach().flatten(0, 1))
            kept = KLReference(kept_rows, weight.detach())
        if task.with_gradient or not self.is_fused:
            outputs = self._composed(
                hidden, weight, task, targets, rows, task.kl_reference, want_entropy=task.want_entropy
            )
            log_probs = outputs.log_probs
            kl = outputs.kl
            entropy = outputs.entropy
        else:
            plan = self._plan(hidden, task)
            head = self._head(weight, task)
            if task.kl_reference is None:
                log_probs, _ = head_log_probs(hidden.flatten(0, 1), targets, plan, head)
            else:
                log_probs, kl = head_full_kl(hidden.flatten(0, 1), targets, plan, head, task.kl_reference)
        shape = task.targets_BS.shape
        return Scores(
            at_rows(log_probs, rows, shape),
            None if kl is None else at_rows(kl, rows, shape),
            kept,
            None if entropy is None else at_rows(entropy, rows, shape),
        )

    def _composed(
        self,
        hidden: Tensor,
        weight: Tensor,
        task: HeadTask,
        targets: Tensor,
        rows: Tensor,
        reference: KLReference | None,
        *,
        want_entropy: bool,
    ) -> TokenOutputs:
        """Return the model's outputs at the counted rows [N], with gradient.

        Collective over the tensor-parallel ranks.
        """
        group = self._linear[0].tp_group
        if self.sequence_parallel:
            # backward: reduce-scatter
            hidden = gather_from_sequence_parallel_region(hidden, group=group)
        else:
            # backward: all-reduce
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        hidden = hidden.flatten(0, 1).index_select(0, rows)
        log_probs, entropy = linear_logprob_entropy(
            hidden,
            weight,
            targets,
            temperature=task.temperature,
            want_entropy=want_entropy,
            num_valid_columns=self._vocab_size,
            chunk_size=self._chunk_size,
            group=group,
            use_triton=None if self.is_fused else False,
        )
        if reference is None:
            return TokenOutputs(log_probs, entropy)
        kl = linear_full_kl(
            hidden,
            weight,
            gathered_rows(reference.hidden_KH, self._plan(hidden, task).counted_alone()),
            reference.weight_VH,
            temperature=task.temperature,
            num_valid_columns=self._vocab_size,
            chunk_size=self._chunk_size,
            group=group,
            use_triton=None if self.is_fused else False,
        )
        return TokenOutputs(log_probs, entropy, kl)

    def _plan(self, hidden: Tensor, task: HeadTask) -> RowPlan:
        group = self._linear[0].tp_group if self.sequence_parallel else None
        num_rows = task.targets_BS.numel()
        return RowPlan.make(task.counted_rows, num_rows, self._chunk_size, device=hidden.device, group=group)

    def _head(self, weight: Tensor, task: HeadTask) -> Head:
        return Head(weight, self._linear[0].tp_group, self._vocab_size, task.temperature)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the same as Megatron's own output layer, under its name in a checkpoint."""
        return self._linear[0].sharded_state_dict(prefix, sharded_offsets, metadata)


def _in_order(values_BS: Tensor) -> Tensor:
    """Return [B, S] as [S * B], the order of Megatron's hidden states."""
    return values_BS.t().reshape(-1)


def _in_order_of_rows(tokens: TokenBatch, rows: Tensor) -> TokenBatch:
    """Return the tokens, with fields [B, S], at the counted rows only."""
    values = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    per_token = {name: _in_order(v) for name, v in values.items() if isinstance(v, Tensor) and v.dim()}
    return replace(tokens, **per_token).select(rows)


def at_rows(values_N: Tensor, rows: Tensor, shape_BS: torch.Size) -> Tensor:
    """Return [B, S] with the values at the counted rows, 0 elsewhere."""
    flat = values_N.new_zeros(shape_BS.numel()).index_copy(0, rows, values_N)
    return flat.view(shape_BS[1], shape_BS[0]).t().contiguous()
