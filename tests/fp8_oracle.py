"""FP8 blocks of a matrix in NumPy, from the definition of e4m3: what tests expect."""

import numpy as np

BLOCK = 128
# Bits seeeemmm: an exponent with bias 7, 3 bits after the point. 0x7f is not a number.
_BYTES = np.arange(0x7F)
_EXPONENTS, _FRACTIONS = _BYTES >> 3, (_BYTES & 7) / 8
MAGNITUDES = np.where(_EXPONENTS == 0, _FRACTIONS * 2.0**-6, (1 + _FRACTIONS) * 2.0 ** (_EXPONENTS - 7))
"""Number of each byte without a sign, float64; 448 is the last."""


def rounded(numbers: np.ndarray) -> np.ndarray:
    """The bytes of the nearest e4m3 numbers, of two as near the one with an even byte."""
    magnitudes = np.minimum(np.abs(numbers.astype(np.float64)), MAGNITUDES[-1])
    above = np.minimum(np.searchsorted(MAGNITUDES, magnitudes), len(MAGNITUDES) - 1)
    below = np.maximum(above - 1, 0)
    up, down = MAGNITUDES[above] - magnitudes, magnitudes - MAGNITUDES[below]
    nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (nearest | np.where(np.signbit(numbers), 0x80, 0)).astype(np.uint8)


def quantized(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes [N, K], scales [N / 128, K / 128] in float32) of a float32 matrix, block by block."""
    rows, columns = weight.shape
    values = np.zeros(weight.shape, np.uint8)
    scales = np.zeros((-(-rows // BLOCK), -(-columns // BLOCK)), np.float32)
    for i, j in np.ndindex(scales.shape):
        place = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        scales[i, j] = max(np.abs(weight[place]).max() / np.float32(448), np.finfo(np.float32).tiny)
        values[place] = rounded(weight[place] / scales[i, j])
    return values, scales


def dequantized(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The float32 numbers that bytes and scales stand for."""
    rows, columns = values.shape
    numbers = MAGNITUDES[values & 0x7F] * np.where(values & 0x80, -1.0, 1.0)
    factors = scales.repeat(BLOCK, 0)[:rows].repeat(BLOCK, 1)[:, :columns]
    return numbers.astype(np.float32) * factors


def through_blocks(weight: np.ndarray) -> np.ndarray:
    """The matrix as a server with FP8 weights computes with it."""
    return dequantized(*quantized(weight))
