"""FP8 blocks of a matrix: 128 x 128 float8 (e4m3) weights with one float32 scale, as SGLang takes
them.

Pure functions. A weight is about its float8 value x its block's scale.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dapo.huggingface.fp8_form import BLOCK

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A scale of 0 would divide 0 by 0, and a subnormal one is 0 for a GPU."""


def quantized(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values [N, K] float8, scales [ceil(N / 128), ceil(K / 128)] float32) of a matrix.

    scale = max(largest |weight| of the block / 448, SMALLEST_SCALE). value = weight / scale, rounded
    to float32 and then to float8, ties to even. NaN or infinity makes a block's scale such too.
    """
    rows, columns = weight_NK.shape
    padded = F.pad(weight_NK.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [n, 128, k, 128]
    scales = (blocks.abs().amax((1, 3), keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    # rounding may put the largest weight just above 448
    values = (blocks / scales).clamp(-LARGEST, LARGEST).to(FP8)
    values = values.flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return values.contiguous(), scales[:, 0, :, 0].contiguous()


def dequantized(values_NK: Tensor, scales: Tensor) -> Tensor:
    """Return the weights [N, K] that a server computes with, in float32."""
    rows, columns = values_NK.shape
    factors = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values_NK.float() * factors


def squares(weight_NK: Tensor, values_NK: Tensor, scales: Tensor) -> Tensor:
    """Return (sum of squared errors, sum of squared weights) of a matrix, [2] float64."""
    weight = weight_NK.float()
    error = weight - dequantized(values_NK, scales)
    return torch.stack([error.square().sum(dtype=torch.float64), weight.square().sum(dtype=torch.float64)])
