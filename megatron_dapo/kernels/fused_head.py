"""The heads of a training run: log-probs, log-probs with a KL, and the loss with its gradient.

`head_log_probs` computes the first, `head_full_kl` the KL to another model with them, and
`fused_dapo_head` the whole loss with its gradient in one pass.

`fused_dapo_head` computes every chunk of logits once. Before the next chunk overwrites the buffer,
it derives statistics, loss and the gradients of logits, hidden states and weight. That takes 6 N H
V operations, without recompute. This works because a token's term of the loss depends only on its
own log-prob, entropy and KL. The division by the global count comes later and is linear. All heads
cut rows alike and compute equal bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, metric_names
from megatron_dapo.kernels.linear_logprob import VocabShare, inverse_temperature
from megatron_dapo.kernels.logits_chunk import ChunkBackend, Divergence, accumulation_dtype, chunk_backend
from megatron_dapo.kernels.pending import wait_for
from megatron_dapo.kernels.row_plan import RowChunk, RowPlan
from megatron_dapo.kernels.statistics import Merged, merge_over, sum_over
from megatron_dapo.kernels.token_loss import token_loss


@dataclass(frozen=True, eq=False)
class Head:
    """The output layer, common to all passes through the head."""

    weight_VH: Tensor
    """This rank's rows of the vocabulary."""
    group: dist.ProcessGroup | None = None
    """The tensor-parallel ranks that share the vocabulary, or None."""
    num_valid_columns: int | None = None
    """Columns of the whole vocabulary, without padding."""
    temperature: float | Tensor = 1.0
    """One number, or one per counted row [N]."""
    use_triton: bool | None = None
    """None: by device."""


@dataclass(frozen=True, eq=False)
class KLReference:
    """The model on the other side of a KL over the whole vocabulary."""

    hidden_KH: Tensor
    """Its hidden states of this rank's counted rows (`RowPlan.kept_rows`); its hidden size may
    differ."""
    weight_VH: Tensor
    """Its rows of the vocabulary, cut like ours."""


@dataclass(frozen=True, eq=False)
class HeadLoss:
    """The loss of a batch. Only `loss_sum` has a gradient."""

    loss_sum: Tensor
    """Scalar."""
    log_probs: Tensor | None
    """[N], or None if not requested."""
    entropy: Tensor | None
    """[N], or None if not requested."""
    count: Tensor
    """The loss's divisor."""
    sums: Tensor
    """Metric sums [K, 2], in the order of `metric_names`."""
    maxima: Tensor
    """Metric maxima [M], in the order of `metric_names`."""


def head_log_probs(
    hidden_LH: Tensor, targets_N: Tensor, plan: RowPlan, head: Head, *, want_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return (log-prob [N], entropy [N] or None) of the plan's rows, without gradient; float32
    (float64 for float64).

    hidden_LH: this rank's rows as the plan cuts them. A row's result does not depend, to the bit,
    on the other rows. On CPU that holds as far as in the matrix library: for hidden sizes of whole
    cache lines.
    """
    with torch.no_grad():
        log_probs = targets_N.new_zeros(plan.num_counted, dtype=accumulation_dtype(hidden_LH.dtype))
        entropy = torch.zeros_like(log_probs) if want_entropy else None
        for chunk, _, merged, _ in _chunks(hidden_LH, targets_N, plan, head, want_entropy):
            log_probs[chunk.places] = merged.log_prob
            if entropy is not None:
                entropy[chunk.places] = merged.entropy
        return log_probs, entropy


def head_full_kl(
    hidden_LH: Tensor, targets_N: Tensor, plan: RowPlan, head: Head, reference: KLReference
) -> tuple[Tensor, Tensor]:
    """Return (log-prob [N], sum_v p(v) (log p(v) - log q(v)) [N]) of the plan's rows.

    Without gradient, as `head_log_probs`; q is the reference's at the same temperature.
    """
    with torch.no_grad():
        log_probs = targets_N.new_zeros(plan.num_counted, dtype=accumulation_dtype(hidden_LH.dtype))
        kl = torch.zeros_like(log_probs)
        for chunk, _, merged, divergence in _chunks(hidden_LH, targets_N, plan, head, False, reference):
            assert divergence is not None, "a reference was given"
            log_probs[chunk.places] = merged.log_prob
            kl[chunk.places] = divergence.kl
        return log_probs, kl


def fused_dapo_head(
    hidden_LH: Tensor,
    targets_N: Tensor,
    plan: RowPlan,
    tokens: TokenBatch,
    loss: LossConfig,
    head: Head,
    *,
    loss_scale: float = 1.0,
    reference: KLReference | None = None,
) -> HeadLoss:
    """Return the summed loss of `algorithms.dapo_loss` over the plan's rows; this very call
    computes its gradients.

    Backward hands out the gradient of hidden_LH: summed over the group, or with sequence
    parallelism this rank's slice. The gradient of the weight is added to weight.main_grad during
    this call, if there is one. It is float32; zero it before, as is Megatron's convention.
    Otherwise backward hands the gradient out too. Every rank of the group must call it with the
    same plan.

    Args:
        hidden_LH: [L, H], this rank's rows in the plan's cut.
        targets_N: [N], the counted rows in order, like every field of tokens.
        loss_scale: the gradient of loss_sum that backward will get; checked there, on the device.
        reference: for the KL over the whole vocabulary (use_full_kl); it gets no gradient.

    Raises:
        TypeError: for a loss other than a sum over tokens; a ratio of whole sequences needs
            `linear_logprob_entropy`.
        RuntimeError: without grad mode, or inside activation recompute, which would add the
            weight's gradient twice.
    """
    if not isinstance(loss, LossConfig):
        raise TypeError(
            f"fused_dapo_head takes a LossConfig, a sum over tokens, not {type(loss).__name__}; for a "
            "loss over whole sequences use linear_logprob_entropy."
        )
    if not torch.is_grad_enabled():
        raise RuntimeError("fused_dapo_head computes gradients: without grad mode use head_log_probs.")
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "fused_dapo_head was run inside a backward pass: activation recompute around it would add the weight's "
            "gradient twice. Leave the head out of the recomputed part, it keeps no logits."
        )
    loss_sum, log_probs, entropy, sums, maxima = _FusedHead.apply(
        hidden_LH, head.weight_VH, targets_N, plan, tokens, loss, head, loss_scale, reference
    )
    return HeadLoss(loss_sum, log_probs, entropy if loss.report_entropy else None, tokens.count, sums, maxima)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, plan, tokens, loss, head, loss_scale, reference):
        dtype = accumulation_dtype(hidden.dtype)
        grad_weight = _grad_weight_buffer(weight, dtype)
        grad_hidden = _GradHidden(hidden, plan, head.group)
        log_probs = torch.zeros(plan.num_counted, dtype=dtype, device=hidden.device)
        entropy = torch.zeros_like(log_probs)
        num_sums, num_maxima = map(len, metric_names(loss))
        loss_sum = torch.zeros((), dtype=dtype, device=hidden.device)
        sums = torch.zeros(num_sums, 2, dtype=torch.float64, device=hidden.device)
        maxima = torch.zeros(num_maxima, dtype=torch.float64, device=hidden.device)
        share = VocabShare.of(weight, head.num_valid_columns, head.group)
        count = tokens.count
        reference = reference if loss.use_full_kl else None
        for chunk, backend, merged, divergence in _chunks(hidden, targets, plan, head, loss.report_entropy, reference):
            selected = replace(tokens.select(chunk.places), count=count)
            count = torch.zeros_like(count)  # counted once, with the first chunk
            kl = None if divergence is None else divergence.kl
            answer = token_loss(merged.log_prob, merged.entropy if loss.report_entropy else None, selected, loss, kl)
            if divergence is not None and answer.grad_kl is not None:
                divergence = divergence._replace(grad=answer.grad_kl * loss_scale)
            grad_entropy = None if answer.grad_entropy is None else answer.grad_entropy * loss_scale
            backend.gradient(merged, answer.grad_log_probs * loss_scale, grad_entropy, divergence)
            grad_hidden.add(chunk, backend.grad_hidden())
            if grad_weight is not None:
                backend.add_grad_weight(grad_weight[: share.num_valid])
            log_probs[chunk.places] = merged.log_prob
            entropy[chunk.places] = merged.entropy
            loss_sum += answer.loss_sum
            sums += answer.sums
            maxima = torch.maximum(maxima, answer.maxima)
        ctx.weight = weight
        ctx.loss_scale = loss_scale
        ctx.grad_hidden = grad_hidden.finish()
        ctx.grad_weight = None if hasattr(weight, "main_grad") else grad_weight
        outputs = (log_probs, entropy, sums, maxima)
        ctx.mark_non_differentiable(*outputs)
        return loss_sum, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *unused):
        if ctx.grad_hidden is None:
            raise RuntimeError("the gradients of fused_dapo_head can be taken once.")
        torch._assert_async(
            (grad_loss == ctx.loss_scale).all(),
            f"fused_dapo_head was given loss_scale={ctx.loss_scale}, but its loss was scaled differently afterwards",
        )
        grad_hidden = ctx.grad_hidden
        ctx.grad_hidden = None
        grad_weight = ctx.grad_weight
        ctx.grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _answer_for_weight(ctx.weight, grad_weight)
        return grad_hidden, grad_weight, *(None,) * 7


def _chunks(
    hidden: Tensor,
    targets: Tensor,
    plan: RowPlan,
    head: Head,
    want_entropy: bool,
    reference: KLReference | None = None,
) -> Iterator[tuple[RowChunk, ChunkBackend, Merged, Divergence | None]]:
    """Yield for each chunk: the chunk, the backend with its logits, its merged statistics, and the
    KL to the reference or None."""
    share = VocabShare.of(head.weight_VH, head.num_valid_columns, head.group)
    largest = max((chunk.num_rows for chunk in plan.chunks), default=0)

    def backend_of(weight_VH: Tensor) -> ChunkBackend:
        weight = weight_VH.detach()[: share.num_valid]
        return chunk_backend(weight, max(plan.chunk_size, largest), largest, head.use_triton)

    backend = backend_of(head.weight_VH)
    other: ChunkBackend | None = None
    other_parts: Iterator[tuple[RowChunk, Tensor]] = iter(())
    if reference is not None:
        other = backend_of(reference.weight_VH)
        other_parts = _gathered(reference.hidden_KH, plan.counted_alone())
    local_targets = targets - share.first
    inv_temperature = inverse_temperature(head.temperature, targets, accumulation_dtype(hidden.dtype))
    for chunk, part in _gathered(hidden.detach(), plan):
        inv = inv_temperature[chunk.places].contiguous()
        own_targets = local_targets[chunk.places].contiguous()
        merged = merge_over(backend.statistics(part, inv, own_targets, want_entropy), head.group)
        divergence = None
        if other is not None:
            _, other_part = next(other_parts)
            other_merged = merge_over(other.statistics(other_part, inv, own_targets, False), head.group)
            kl = sum_over(backend.divergence(other, merged, other_merged), head.group)
            divergence = Divergence(other, kl, torch.zeros_like(kl))
        yield chunk, backend, merged, divergence


def _gathered(hidden: Tensor, plan: RowPlan) -> Iterator[tuple[RowChunk, Tensor]]:
    """Yield every chunk with its rows [n, H]. With sequence parallelism the next one travels while
    this one is worked on."""
    if plan.group is None:
        for chunk in plan.chunks:
            yield chunk, hidden.index_select(0, chunk.local)
        return
    size = plan.group.size()

    def start(chunk: RowChunk) -> tuple[Tensor, dist.Work]:
        own_rows = hidden.new_zeros(chunk.width, hidden.size(1))
        own_rows[: len(chunk.local)] = hidden.index_select(0, chunk.local)
        gathered = hidden.new_empty(size * chunk.width, hidden.size(1))
        return gathered, dist.all_gather_into_tensor(gathered, own_rows, group=plan.group, async_op=True)

    ahead = [start(chunk) for chunk in plan.chunks[:1]]
    for i, chunk in enumerate(plan.chunks):
        gathered, work = ahead.pop()
        wait_for(work)
        ahead += [start(following) for following in plan.chunks[i + 1 : i + 2]]
        yield chunk, gathered if chunk.kept is None else gathered.index_select(0, chunk.kept)


def gathered_rows(hidden_KH: Tensor, plan: RowPlan) -> Tensor:
    """Return [N, H]: all the rows that the ranks of the plan hold, in order, on every one of
    them."""
    whole = hidden_KH.new_empty(plan.num_counted, hidden_KH.size(1))
    for chunk, part in _gathered(hidden_KH, plan):
        whole[chunk.places] = part
    return whole


class _GradHidden:
    """The gradient of this rank's hidden rows, summed over the ranks chunk by chunk while the next
    one is computed."""

    def __init__(self, hidden: Tensor, plan: RowPlan, group: dist.ProcessGroup | None) -> None:
        self._grad = torch.zeros_like(hidden)
        self._plan = plan
        self._group = group
        self._pending: tuple | None = None

    def add(self, chunk: RowChunk, share_NH: Tensor) -> None:
        """Add this rank's share of the chunk's rows."""
        self._settle()
        if self._plan.group is not None:
            whole = share_NH
            if chunk.kept is not None:
                whole = share_NH.new_zeros(self._plan.group.size() * chunk.width, share_NH.size(1))
                whole.index_copy_(0, chunk.kept, share_NH)
            reduced_rows = share_NH.new_empty(chunk.width, share_NH.size(1))
            work = dist.reduce_scatter_tensor(reduced_rows, whole, group=self._plan.group, async_op=True)
            self._pending = (work, chunk, reduced_rows, whole)  # `whole` must live until then
        elif self._group is not None and self._group.size() > 1:
            work = dist.all_reduce(share_NH, group=self._group, async_op=True)
            self._pending = (work, chunk, share_NH, None)
        else:
            self._grad.index_copy_(0, chunk.local, share_NH)

    def finish(self) -> Tensor:
        self._settle()
        return self._grad

    def _settle(self) -> None:
        if self._pending is not None:
            work, chunk, rows, _ = self._pending
            wait_for(work)
            self._grad.index_copy_(0, chunk.local, rows[: len(chunk.local)])
            self._pending = None


def _grad_weight_buffer(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the buffer that sums the weight's gradient: Megatron's or a new one; None for a frozen
    weight."""
    if not weight.requires_grad:
        return None
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return torch.zeros_like(weight, dtype=dtype)
    if main_grad.dtype != dtype:
        raise TypeError(f"weight.main_grad is {main_grad.dtype}; fused_dapo_head adds gradients in {dtype}")
    return main_grad


def _answer_for_weight(weight: Tensor, grad_weight: Tensor | None) -> Tensor:
    """Return backward's result for the weight.

    If main_grad has the gradient already, Megatron expects a dummy that fires the hooks. It is
    zeros if an embedding of the same weight adds its own gradient to it.
    """
    if grad_weight is not None:
        return grad_weight.to(weight.dtype)
    # Megatron's mark, of no tensor's type
    setattr(weight, "grad_added_to_main_grad", True)  # noqa: B010
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
