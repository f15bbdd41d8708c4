"""FP8 blocks of a matrix: 128 x 128 float8 (e4m3) weights with one float32 scale, as SGLang takes
them.

Pure functions. A weight is about its float8 value x its block's scale.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dapo.common.sizes import ceil_div
from megatron_dapo.huggingface.fp8_form import BLOCK

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A scale of 0 would divide 0 by 0, and a subnormal one is 0 for a GPU."""
ROWS = 8 * BLOCK
"""Rows at once: the numbers between would be several times a whole matrix in float32."""


def quantized(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values [N, K] float8, scales [ceil(N / 128), ceil(K / 128)] float32) of a matrix.

    scale = max(largest |weight| of the block / 448, SMALLEST_SCALE). value = weight / scale, rounded
    to float32 and then to float8, ties to even. NaN or infinity makes a block's scale such too.
    """
    rows, columns = weight_NK.shape
    values = torch.empty(rows, columns, dtype=FP8, device=weight_NK.device)
    blocks_NK = ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)
    scales = torch.empty(blocks_NK, dtype=torch.float32, device=weight_NK.device)
    for weight, part, part_scales in _parts(weight_NK, values, scales):
        padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -len(weight) % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [n, 128, k, 128]
        block_scales = (blocks.abs().amax((1, 3), keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
        # rounding may put the largest weight just above 448
        rounded = (blocks / block_scales).clamp(-LARGEST, LARGEST).to(FP8)
        part.copy_(rounded.flatten(2, 3).flatten(0, 1)[: len(weight), :columns])
        part_scales.copy_(block_scales[:, 0, :, 0])
    return values, scales


def _parts(weight_NK: Tensor, values_NK: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Return views of ROWS at a time, with their blocks."""
    return zip(weight_NK.split(ROWS), values_NK.split(ROWS), scales.split(ROWS // BLOCK), strict=True)


def dequantized(values_NK: Tensor, scales: Tensor) -> Tensor:
    """Return the weights [N, K] that a server computes with, in float32."""
    rows, columns = values_NK.shape
    factors = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values_NK.float() * factors


def squares(weight_NK: Tensor, values_NK: Tensor, scales: Tensor) -> Tensor:
    """Return (sum of squared errors, sum of squared weights) of a matrix, [2] float64."""
    sums = torch.zeros(2, dtype=torch.float64, device=weight_NK.device)
    for weight, part, part_scales in _parts(weight_NK, values_NK, scales):
        error = weight.float() - dequantized(part, part_scales)
        sums += torch.stack([each.square().sum(dtype=torch.float64) for each in (error, weight.float())])
    return sums
