"""Statistics of hidden @ weight.T in one kernel: the logits live in registers and are never written.

A program takes one tile of rows and one split of the vocabulary at a time and keeps m, s, u, x_t of its rows while it
walks over the split's column tiles; tiles of both operands come in through TMA descriptors made on the host. What a row
gets depends on its own numbers, the block sizes and the vocabulary, not on its company, so a log-prob has the same bits
however its batch is packed (a library's product chooses its algorithm by the batch).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_dapo.kernels import tuning
from megatron_dapo.kernels.statistics import empty_share
from megatron_dapo.kernels.tuning import LinearTiles

LOG2E = tl.constexpr(1.4426950408889634)
# what differs between batches must not compile anew in the middle of a run
PER_BATCH = ["num_rows"]
PER_ROW = "inv_temperature local_targets stats".split()


def linear_statistics(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    inv_temperature_N: Tensor,
    local_targets_N: Tensor,
    *,
    num_valid: int,
    want_entropy: bool,
    tiles: LinearTiles | None = None,
) -> Tensor:
    """[S, N, 4] float32: m, s, u, x_t of each row over each of S splits of the first `num_valid` rows of the weight.

    To be merged like the statistics of S ranks (`kernels.statistics`). hidden and weight: one dtype, bfloat16 or
    float16, H a multiple of 8 (else ValueError); products are accumulated in float32. inv_temperature_N: float32.
    local_targets_N: int64, a target outside [0, num_valid) gives x_t = -inf. u is 0 unless entropy is wanted.
    """
    hidden_NH, weight_VH = _checked(hidden_NH, weight_VH)
    (num_rows, hidden_size), num_valid = hidden_NH.shape, max(0, min(num_valid, weight_VH.size(0)))
    arch = tuning.architecture(hidden_NH.device)
    tiles = tiles or tuning.lookup(arch, hidden_size, weight_VH.size(0)).linear
    num_splits = triton.cdiv(triton.cdiv(num_valid, tiles.block_n), tiles.tiles_per_split)
    stats_SN4 = hidden_NH.new_empty((num_splits, num_rows, 4), dtype=torch.float32)
    if not num_rows or not num_splits:
        return empty_share(num_rows, torch.float32, hidden_NH.device)[None]
    num_items = triton.cdiv(num_rows, tiles.block_m) * num_splits
    linear_statistics_kernel[(min(num_items, _num_programs(hidden_NH.device)),)](
        TensorDescriptor.from_tensor(hidden_NH, [tiles.block_m, tiles.block_k]),
        TensorDescriptor.from_tensor(weight_VH, [tiles.block_n, tiles.block_k]),
        inv_temperature_N.contiguous(),
        local_targets_N.contiguous(),
        stats_SN4,
        num_rows,
        num_valid,
        hidden_size,
        num_splits,
        WANT_ENTROPY=want_entropy,
        TILES_PER_SPLIT=tiles.tiles_per_split,
        GROUP_M=tiles.group_m,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,  # a fused acc * scale - max would round the logit otherwise than max was rounded
    )
    return stats_SN4


def _checked(hidden_NH: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor]:
    if hidden_NH.dtype != weight_VH.dtype or hidden_NH.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"one half-precision dtype is needed, got {hidden_NH.dtype} and {weight_VH.dtype}")
    if hidden_NH.size(1) % 8:
        raise ValueError(f"hidden size {hidden_NH.size(1)} is no multiple of 8: TMA needs rows of whole 16 bytes")
    return hidden_NH.contiguous(), weight_VH.contiguous()


def _num_programs(device: torch.device) -> int:
    """One per multiprocessor; any number gives the same bits."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=PER_ROW)
def linear_statistics_kernel(
    hidden,
    weight,
    inv_temperature,
    local_targets,
    stats,
    num_rows,
    num_valid,
    hidden_size,
    num_splits,
    WANT_ENTROPY: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    num_column_tiles = tl.cdiv(num_valid, BLOCK_N)
    for item in range(tl.program_id(0), num_row_tiles * num_splits, tl.num_programs(0)):
        # groups of GROUP_M row tiles go through all splits together, so that both operands are read from L2
        first_row_tile = item // (GROUP_M * num_splits) * GROUP_M
        group = min(num_row_tiles - first_row_tile, GROUP_M)
        place = item % (GROUP_M * num_splits)
        row_tile = first_row_tile + place % group
        split = place // group
        rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = rows < num_rows
        scale = tl.load(inv_temperature + rows, mask=is_row, other=0.0)
        target = tl.load(local_targets + rows, mask=is_row, other=-1)
        target = tl.where((target >= 0) & (target < num_valid), target, -1).to(tl.int32)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        s = tl.zeros((BLOCK_M,), tl.float32)
        u = tl.zeros((BLOCK_M,), tl.float32)
        own = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        first_tile = split * TILES_PER_SPLIT
        for tile in range(first_tile, min(first_tile + TILES_PER_SPLIT, num_column_tiles)):
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(0, hidden_size, BLOCK_K):
                a = hidden.load([row_tile * BLOCK_M, k])
                b = weight.load([tile * BLOCK_N, k])
                acc = tl.dot(a, b.T, acc)
            columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            x = tl.where(columns[None, :] < num_valid, acc * scale[:, None], float("-inf"))
            own = tl.maximum(own, tl.max(tl.where(columns[None, :] == target[:, None], x, float("-inf")), 1))
            m_new = tl.maximum(m, tl.max(x, 1))  # finite: the first column of a tile is always valid
            d = x - m_new[:, None]
            e = tl.exp2(d * LOG2E)
            fade = tl.exp2((m - m_new) * LOG2E)
            if WANT_ENTROPY:
                grown = tl.where(s > 0, (m - m_new) * s, 0.0)
                u = fade * (u + grown) + tl.sum(tl.where(e > 0, d * e, 0.0), 1)
            s = fade * s + tl.sum(e, 1)
            m = m_new
        out = stats + (split.to(tl.int64) * num_rows + rows) * 4
        tl.store(out, m, mask=is_row)
        tl.store(out + 1, s, mask=is_row)
        tl.store(out + 2, u, mask=is_row)
        tl.store(out + 3, own, mask=is_row)
