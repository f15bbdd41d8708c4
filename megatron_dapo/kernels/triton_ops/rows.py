"""Statistics of rows of logits, the KL to another model's rows, and their gradient. Each kernel
reads one matrix or two once; the last two write one. One program per row.

The formulas are those of `kernels.statistics`. Logits may be of any float dtype up to float32 and
hold -inf; arithmetic is float32. Row offsets are 64-bit: 32768 tokens of a whole vocabulary are 5e9
logits. A row's result depends only on that row and the block size.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_dapo.kernels import tuning
from megatron_dapo.kernels.statistics import Merged
from megatron_dapo.kernels.tuning import RowTiles

LOG2E = tl.constexpr(1.4426950408889634)
# a fused x * scale - max would round x otherwise than max was rounded
NO_FUSION = {"enable_fp_fusion": False}
# one number per row: a slice that starts off a 16-byte boundary must not compile anew in the middle
# of a run
PER_ROW = (
    "inv_temperature local_targets stats top log_s entropy grad_log_prob grad_entropy "
    "kl grad_kl ref_top ref_log_s share"
).split()


class KLTerms(NamedTuple):
    """The KL to a reference."""

    differences: Tensor
    """The output of `row_divergence`, [N, V] float32."""
    kl: Tensor
    """[N]."""
    grad: Tensor
    """dL/dKL, [N]."""


def row_statistics(
    logits_NV: Tensor,
    inv_temperature_N: Tensor,
    local_targets_N: Tensor,
    *,
    want_entropy: bool,
    tiles: RowTiles | None = None,
) -> Tensor:
    """Return m, s, u, x_t of each row of logits * inv_temperature, [N, 4] float32; u is 0 unless
    entropy is wanted.

    logits_NV: any row stride, unit column stride. inv_temperature_N: float32. local_targets_N:
    int64; a target outside [0, V) belongs to another rank, and its x_t is -inf.
    """
    num_rows, num_columns = logits_NV.shape
    stats_N4 = logits_NV.new_empty((num_rows, 4), dtype=torch.float32)
    if num_rows:
        tiles = tiles or _tiles(logits_NV)
        row_statistics_kernel[(num_rows,)](
            _checked(logits_NV),
            inv_temperature_N.contiguous(),
            local_targets_N.contiguous(),
            stats_N4,
            num_columns,
            logits_NV.stride(0),
            WANT_ENTROPY=want_entropy,
            BLOCK_V=tiles.block_v,
            num_warps=tiles.num_warps,
            **NO_FUSION,
        )
    return stats_N4


def row_divergence(
    logits_NV: Tensor,
    reference_NV: Tensor,
    inv_temperature_N: Tensor,
    merged: Merged,
    of_reference: Merged,
    *,
    tiles: RowTiles | None = None,
) -> Tensor:
    """Return sum_j p_j (log p_j - log q_j) over these columns, [N] float32.

    The differences log p_j - log q_j overwrite reference_NV.
    reference_NV: logits of another model at the same temperature, laid out like logits_NV: float32,
    unit column stride.
    """
    num_rows, num_columns = logits_NV.shape
    share_N = logits_NV.new_zeros(num_rows, dtype=torch.float32)
    if num_rows and num_columns:
        tiles = tiles or _tiles(logits_NV)
        row_divergence_kernel[(num_rows,)](
            _checked(logits_NV),
            _checked(reference_NV),
            inv_temperature_N.contiguous(),
            merged.top.contiguous(),
            merged.log_s.contiguous(),
            of_reference.top.contiguous(),
            of_reference.log_s.contiguous(),
            share_N,
            num_columns,
            logits_NV.stride(0),
            reference_NV.stride(0),
            BLOCK_V=tiles.block_v,
            num_warps=tiles.num_warps,
            **NO_FUSION,
        )
    return share_N


def row_gradient(
    logits_NV: Tensor,
    inv_temperature_N: Tensor,
    local_targets_N: Tensor,
    merged: Merged,
    grad_log_prob_N: Tensor,
    grad_entropy_N: Tensor | None,
    out_NV: Tensor,
    *,
    kl: KLTerms | None = None,
    tiles: RowTiles | None = None,
) -> None:
    """Write dL/dlogits into `out_NV`: `logits_NV` itself, or other memory in any float dtype up to
    float32.

    Rows with incoming gradients of only 0 get 0 for any logits, so that NaN in padding does not
    spread.
    """
    num_rows, num_columns = logits_NV.shape
    if not num_rows or not num_columns:
        return
    tiles = tiles or _tiles(logits_NV)
    row_gradient_kernel[(num_rows,)](
        _checked(logits_NV),
        inv_temperature_N.contiguous(),
        local_targets_N.contiguous(),
        merged.top.contiguous(),
        merged.log_s.contiguous(),
        merged.entropy.contiguous(),
        grad_log_prob_N.contiguous(),
        None if grad_entropy_N is None else grad_entropy_N.contiguous(),
        None if kl is None else _checked(kl.differences),
        None if kl is None else kl.kl.contiguous(),
        None if kl is None else kl.grad.contiguous(),
        _checked(out_NV),
        num_columns,
        logits_NV.stride(0),
        0 if kl is None else kl.differences.stride(0),
        out_NV.stride(0),
        WITH_ENTROPY=grad_entropy_N is not None,
        BLOCK_V=tiles.block_v,
        num_warps=tiles.num_warps,
        **NO_FUSION,
    )


def _tiles(logits_NV: Tensor) -> RowTiles:
    return tuning.lookup(tuning.architecture(logits_NV.device), logits_NV.size(1))


def _checked(matrix: Tensor) -> Tensor:
    if matrix.stride(1) != 1 and matrix.size(1) > 1:
        raise ValueError(f"columns must be contiguous, got strides {matrix.stride()}")
    return matrix


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def row_statistics_kernel(
    logits,
    inv_temperature,
    local_targets,
    stats,
    num_columns,
    row_stride,
    WANT_ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    scale = tl.load(inv_temperature + row)
    target = tl.load(local_targets + row)
    m = float("-inf")
    s = 0.0
    u = 0.0
    block = tl.arange(0, BLOCK_V)
    # a mask at an odd column would make every load narrow
    num_whole = num_columns // BLOCK_V * BLOCK_V
    for start in range(0, num_whole, BLOCK_V):
        x = tl.load(logits + start + block).to(tl.float32) * scale
        m, s, u = _joined(m, s, u, x, WANT_ENTROPY)
    if num_whole < num_columns:
        columns = num_whole + block
        x = tl.load(logits + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32) * scale
        m, s, u = _joined(m, s, u, x, WANT_ENTROPY)
    is_mine = (target >= 0) & (target < num_columns)
    own = tl.load(logits + target, mask=is_mine, other=float("-inf")).to(tl.float32) * scale
    stats += row * 4
    tl.store(stats, m)
    tl.store(stats + 1, s)
    tl.store(stats + 2, u)
    tl.store(stats + 3, own)


@triton.jit
def _joined(m, s, u, x, WANT_ENTROPY: tl.constexpr):
    """Return the merged statistics of the previous blocks and the block x."""
    m_new = tl.maximum(m, tl.max(x, 0))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # only -inf so far: every e below is 0
    d = x - shift
    e = tl.exp2(d * LOG2E)
    fade = tl.exp2((m - shift) * LOG2E)
    if WANT_ENTROPY:
        u = fade * (u + tl.where(s > 0, (m - shift) * s, 0.0)) + tl.sum(tl.where(e > 0, d * e, 0.0), 0)
    return m_new, fade * s + tl.sum(e, 0), u


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def row_divergence_kernel(
    logits,
    reference,
    inv_temperature,
    top,
    log_s,
    ref_top,
    ref_log_s,
    share,
    num_columns,
    row_stride,
    ref_stride,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    reference += row * ref_stride
    scale = tl.load(inv_temperature + row)
    row_top = tl.load(top + row)
    row_log_s = tl.load(log_s + row)
    its_top = tl.load(ref_top + row)
    its_log_s = tl.load(ref_log_s + row)
    total = 0.0
    block = tl.arange(0, BLOCK_V)
    num_whole = num_columns // BLOCK_V * BLOCK_V  # as above
    for start in range(0, num_whole, BLOCK_V):
        log_p = (tl.load(logits + start + block).to(tl.float32) * scale - row_top) - row_log_s
        difference = log_p - ((tl.load(reference + start + block) * scale - its_top) - its_log_s)
        tl.store(reference + start + block, difference)
        p = tl.exp2(log_p * LOG2E)
        total += tl.sum(tl.where(p > 0, p * difference, 0.0), 0)
    if num_whole < num_columns:
        columns = num_whole + block
        inside = columns < num_columns
        log_p = (tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32) * scale - row_top) - row_log_s
        its = (tl.load(reference + columns, mask=inside, other=0.0) * scale - its_top) - its_log_s
        difference = log_p - its
        tl.store(reference + columns, difference, mask=inside)
        p = tl.exp2(log_p * LOG2E)
        total += tl.sum(tl.where(inside & (p > 0), p * difference, 0.0), 0)
    tl.store(share + row, total)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def row_gradient_kernel(
    logits,
    inv_temperature,
    local_targets,
    top,
    log_s,
    entropy,
    grad_log_prob,
    grad_entropy,
    differences,
    kl,
    grad_kl,
    out,
    num_columns,
    row_stride,
    difference_stride,
    out_stride,
    WITH_ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    out += row * out_stride
    scale = tl.load(inv_temperature + row)
    target = tl.load(local_targets + row)
    row_top = tl.load(top + row)
    row_log_s = tl.load(log_s + row)
    g_lp = tl.load(grad_log_prob + row).to(tl.float32)
    counts = g_lp != 0
    if WITH_ENTROPY:
        row_entropy = tl.load(entropy + row)
        g_h = tl.load(grad_entropy + row).to(tl.float32)
        counts = counts | (g_h != 0)
    else:
        g_h = 0.0
        row_entropy = 0.0
    row_kl = 0.0
    g_kl = 0.0
    if differences is not None:
        differences += row * difference_stride
        row_kl = tl.load(kl + row)
        g_kl = tl.load(grad_kl + row).to(tl.float32)
        counts = counts | (g_kl != 0)
    block = tl.arange(0, BLOCK_V)
    num_whole = num_columns // BLOCK_V * BLOCK_V  # as above
    if counts:
        for start in range(0, num_whole, BLOCK_V):
            x = tl.load(logits + start + block).to(tl.float32) * scale
            d = _slope(x, start + block == target, row_top, row_log_s, row_entropy, g_lp, g_h, WITH_ENTROPY)
            if differences is not None:
                d += g_kl * _kl_slope(x, tl.load(differences + start + block), row_top, row_log_s, row_kl)
            tl.store(out + start + block, (d * scale).to(out.dtype.element_ty))
        if num_whole < num_columns:
            columns = num_whole + block
            x = tl.load(logits + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32) * scale
            d = _slope(x, columns == target, row_top, row_log_s, row_entropy, g_lp, g_h, WITH_ENTROPY)
            if differences is not None:
                gap = tl.load(differences + columns, mask=columns < num_columns, other=0.0)
                d += g_kl * _kl_slope(x, gap, row_top, row_log_s, row_kl)
            tl.store(out + columns, (d * scale).to(out.dtype.element_ty), mask=columns < num_columns)
    else:
        zero = tl.zeros((BLOCK_V,), out.dtype.element_ty)
        for start in range(0, num_columns, BLOCK_V):
            tl.store(out + start + block, zero, mask=start + block < num_columns)


@triton.jit
def _slope(x, is_target, top, log_s, entropy, g_lp, g_h, WITH_ENTROPY: tl.constexpr):
    """dL/dx of a block."""
    log_p = (x - top) - log_s
    p = tl.exp2(log_p * LOG2E)
    d = g_lp * (tl.where(is_target, 1.0, 0.0) - p)
    if WITH_ENTROPY:
        d -= g_h * p * (tl.where(p > 0, log_p, 0.0) + entropy)  # p log p -> 0 if p underflows
    return d


@triton.jit
def _kl_slope(x, difference, top, log_s, kl):
    """dKL/dx of a block."""
    p = tl.exp2(((x - top) - log_s) * LOG2E)
    return tl.where(p > 0, p * (difference - kl), 0.0)
