"""Log-probability and entropy of given tokens from logits that already exist, for a caller who brings them.

Forward reads the logits once. Backward reads them once more and writes their gradient, into memory of its own or, if
the caller says so, over the logits themselves, so that nothing of their size is ever added. `linear_logprob_entropy`
does the same from hidden states and never holds the logits at all: prefer it where the head's weight is at hand.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dapo.kernels.linear_logprob import VocabShare, inverse_temperature
from megatron_dapo.kernels.logits_chunk import accumulation_dtype, own_targets, runs_on_triton
from megatron_dapo.kernels.statistics import Merged, merge_over

_ELEMENTS_AT_ONCE = 2**20  # of the torch backend: 4 MiB of float32, twice, which stay in the cache


def logprob_entropy_from_logits(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    want_entropy: bool = True,
    inplace_backward: bool = False,
    num_valid_columns: int | None = None,
    group: dist.ProcessGroup | None = None,
    use_triton: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log p(targets) [N], and the entropy [N] if wanted, of softmax(logits / temperature).

    logits_NV: [N, V / ranks], this rank's columns, adjacent in memory; -inf is allowed. targets_N: [N] int64, in the
    whole vocabulary. temperature: one number, or one per row [N]. num_valid_columns: columns of the whole vocabulary
    that exist; the rest gets no probability and a gradient of 0. use_triton None: by device.

    inplace_backward: backward overwrites the logits with their gradient. Then the logits must be the result of an
    operation, not a leaf (ValueError), nobody may read them after backward, and backward runs once (RuntimeError).
    Whoever changes them between forward and backward is told by autograd, as for any saved tensor.

    Float32 results (float64 for float64 logits), at most 0. Every rank of `group` must call it with the same N.
    """
    if logits_NV.stride(1) != 1 and logits_NV.size(1) > 1:
        raise ValueError(f"the columns of logits must be adjacent in memory, got strides {logits_NV.stride()}")
    if inplace_backward:
        _check_overwritable(logits_NV)
    share = VocabShare.of(logits_NV.t(), num_valid_columns, group)
    log_prob, entropy = _FromLogits.apply(
        logits_NV,
        targets_N - share.first,
        inverse_temperature(temperature, targets_N, accumulation_dtype(logits_NV.dtype)),
        want_entropy,
        inplace_backward,
        share.num_valid,
        group,
        runs_on_triton(logits_NV) if use_triton is None else use_triton,
    )
    return log_prob, entropy if want_entropy else None


def row_statistics(
    logits_NV: Tensor, inv_temperature_N: Tensor, local_targets_N: Tensor, *, want_entropy: bool
) -> Tensor:
    """[N, 4] as in `statistics.py`; what `triton_ops.rows.row_statistics` computes, in the accumulation dtype."""
    stats_N4 = logits_NV.new_zeros((logits_NV.size(0), 4), dtype=accumulation_dtype(logits_NV.dtype))
    stats_N4[:, 0] = stats_N4[:, 3] = float("-inf")
    for rows in _row_chunks(logits_NV):
        x = logits_NV[rows].to(stats_N4.dtype) * inv_temperature_N[rows, None]
        is_mine, index = own_targets(local_targets_N[rows], x.size(1))
        stats_N4[rows, 3] = torch.where(is_mine, x.gather(1, index)[:, 0], float("-inf"))
        m = x.amax(1)
        e = x.sub_(torch.where(m == float("-inf"), 0.0, m)[:, None]).exp()
        stats_N4[rows, 0] = m
        stats_N4[rows, 1] = e.sum(1)
        if want_entropy:
            x.masked_fill_(e == 0, 0.0)  # x e^x -> 0 where e^x underflows
            stats_N4[rows, 2] = torch.linalg.vecdot(x, e)
    return stats_N4


def row_gradient(
    logits_NV: Tensor,
    inv_temperature_N: Tensor,
    local_targets_N: Tensor,
    merged: Merged,
    grad_log_prob_N: Tensor,
    grad_entropy_N: Tensor | None,
    out_NV: Tensor,
) -> None:
    """Writes dL/dlogits into `out_NV`, which may be `logits_NV`; what `triton_ops.rows.row_gradient` computes.

    Rows whose incoming gradients are both 0 get 0, whatever their logits are: NaN in padding goes nowhere.
    """
    for rows in _row_chunks(logits_NV):
        scale, g_lp = inv_temperature_N[rows, None], grad_log_prob_N[rows, None]
        counts = g_lp != 0
        x = logits_NV[rows].to(merged.top.dtype) * scale
        log_p = x.sub_(merged.top[rows, None]).sub_(merged.log_s[rows, None])
        d = log_p.exp()
        if grad_entropy_N is None:
            d.mul_(-g_lp)
        else:
            g_h = grad_entropy_N[rows, None]
            counts = counts | (g_h != 0)
            log_p.masked_fill_(d == 0, 0.0)  # p log p -> 0 where p underflows
            d.mul_(log_p.add_(merged.entropy[rows, None]).mul_(-g_h).sub_(g_lp))
        is_mine, index = own_targets(local_targets_N[rows], d.size(1))
        d.scatter_add_(1, index, torch.where(is_mine[:, None], g_lp, 0.0).to(d.dtype))
        out_NV[rows] = d.mul_(scale).masked_fill_(~counts, 0.0)


def _row_chunks(logits_NV: Tensor) -> Iterator[slice]:
    """None for logits without columns."""
    num_rows, num_columns = logits_NV.shape
    size = max(1, _ELEMENTS_AT_ONCE // max(num_columns, 1))
    return (slice(start, start + size) for start in range(0, num_rows if num_columns else 0, size))


def _check_overwritable(logits_NV: Tensor) -> None:
    if logits_NV.is_leaf and logits_NV.requires_grad:
        raise ValueError("inplace_backward would overwrite a leaf: pass the result of an operation, as a head's")
    if logits_NV.size(0) > 1 and abs(logits_NV.stride(0)) < logits_NV.size(1):
        raise ValueError(f"inplace_backward needs rows that do not overlap, got strides {logits_NV.stride()}")


def _row_operations(use_triton: bool) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    if not use_triton:
        return row_statistics, row_gradient
    from megatron_dapo.kernels.triton_ops import rows

    return rows.row_statistics, rows.row_gradient


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, local_targets, inv_temperature, want_entropy, inplace, num_valid, group, use_triton):
        statistics, _ = _row_operations(use_triton)
        stats = statistics(logits[:, :num_valid], inv_temperature, local_targets, want_entropy=want_entropy)
        merged = merge_over(stats, group)
        ctx.save_for_backward(logits, local_targets, inv_temperature, *merged)
        ctx.settings = (inplace, num_valid, use_triton)
        ctx.is_overwritten = False
        ctx.set_materialize_grads(False)
        return merged.log_prob, merged.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy):
        inplace, num_valid, use_triton = ctx.settings
        if ctx.is_overwritten:
            raise RuntimeError("a second backward: the logits were overwritten by the first (inplace_backward=True)")
        logits, local_targets, inv_temperature, *merged = ctx.saved_tensors
        merged = Merged(*merged)
        if grad_log_prob is None:
            grad_log_prob = torch.zeros_like(merged.top)
        out = logits.detach() if inplace else torch.empty_like(logits)
        _, gradient = _row_operations(use_triton)
        gradient(
            logits[:, :num_valid],
            inv_temperature,
            local_targets,
            merged,
            grad_log_prob,
            grad_entropy,
            out[:, :num_valid],
        )
        if num_valid < out.size(1):
            out[:, num_valid:] = 0.0
        if inplace:
            ctx.is_overwritten = True
            torch.autograd.graph.increment_version(logits)  # a kernel's writes are not counted by themselves
        return out, *(None,) * 7
