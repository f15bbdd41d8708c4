"""FP8 blocks are those of the definition, bit for bit, and mean what transformers and SGLang make
of them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.memory import peak_bytes
from megatron_dapo.huggingface.fp8_form import BLOCK
from megatron_dapo.weight_sync.fp8_blocks import ROWS, SMALLEST_SCALE, dequantized, quantized, squares
from tests import fp8_oracle
from tests.proofs import amount, proof
from tests.sglang_cpu_cases import in_server_process

pytestmark = pytest.mark.unit

SIZES = st.sampled_from([1, 2, 127, 128, 129, 256, 300])


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Of a part of a block to several; of one magnitude in each, from subnormal to the largest; some
    zero."""
    rows, columns = draw(SIZES), draw(SIZES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    for top in range(0, rows, 128):
        for left in range(0, columns, 128):
            exponent = draw(st.sampled_from([-140, -126, -30, -6, 0, 3, 100, 126]))
            factor = 0.0 if draw(st.booleans()) and draw(st.booleans()) else 2.0**exponent
            weight[top : top + 128, left : left + 128] *= factor
    largest = torch.finfo(torch.bfloat16).max
    weight = weight.clamp(-largest, largest)
    return weight.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


@settings(max_examples=amount(25, 500), deadline=None)
@given(matrices())
def test_blocks_and_scales_are_those_of_the_definition_bit_for_bit(weight):
    values, scales = quantized(weight)
    expected, expected_scales = fp8_oracle.quantized(weight.float().numpy())
    assert values.dtype == torch.float8_e4m3fn and values.is_contiguous() and scales.is_contiguous()
    assert np.array_equal(scales.numpy(), expected_scales)
    assert np.array_equal(values.view(torch.uint8).numpy(), expected)
    assert np.array_equal(dequantized(values, scales).numpy(), fp8_oracle.dequantized(expected, expected_scales))


@settings(max_examples=amount(15, 300), deadline=None)
@given(matrices())
def test_a_weight_is_off_by_half_a_step_of_its_block_at_most(weight):
    """e4m3 has 3 bits after the point, and steps of 2^-9 near 0."""
    values, scales = quantized(weight)
    exact = weight.double()
    factors = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.size(0), : weight.size(1)]
    error = (values.double() * factors - exact).abs()
    assert ((error <= torch.maximum(exact.abs() * 2**-4, factors * 2**-10) * (1 + 1e-6)).all()).item()


def test_transformers_reads_the_blocks_as_we_do():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values, scales = quantized(torch.randn(256, 384, generator=torch.Generator().manual_seed(1)).bfloat16())
    read = Fp8Dequantize(None)._dequantize_one(values, scales, output_dtype=torch.float32)
    assert torch.equal(read, dequantized(values, scales))


READ_BY_SGLANG = """
import torch
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
from megatron_dapo.weight_sync.fp8_blocks import dequantized, quantized

for rows, columns in ((256, 384), (130, 128), (576, 256)):
    values, scales = quantized(torch.randn(rows, columns))
    read = block_quant_dequant(values, scales, [128, 128], torch.float32)
    print(torch.equal(read, dequantized(values, scales)))
"""


@proof
def test_sglang_reads_the_blocks_as_we_do():
    done = in_server_process(READ_BY_SGLANG)
    assert done.stdout.split() == ["True"] * 3, done.stderr


def test_a_rank_with_whole_blocks_has_the_blocks_of_the_whole_and_another_one_has_not():
    weight = torch.randn(512, 256, generator=torch.Generator().manual_seed(3))
    values, scales = (part.view(torch.uint8) for part in quantized(weight))
    for dim, num_ranks in ((0, 2), (0, 4), (1, 2)):
        for part, own, own_scales in zip(
            weight.chunk(num_ranks, dim), values.chunk(num_ranks, dim), scales.chunk(num_ranks, dim), strict=True
        ):
            alone, alone_scales = (each.view(torch.uint8) for each in quantized(part.contiguous()))
            assert torch.equal(alone, own) and torch.equal(alone_scales, own_scales)
    (first, _) = quantized(weight[:64])
    assert not torch.equal(first.view(torch.uint8), values[:64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tall_matrix_is_quantized_in_parts_without_a_seam_and_in_little_memory(dtype):
    weight = torch.randn(2 * ROWS + 130, 130, generator=torch.Generator().manual_seed(4)).to(dtype)
    values, scales = quantized(weight)
    expected, expected_scales = fp8_oracle.quantized(weight.float().numpy())
    assert np.array_equal(values.view(torch.uint8).numpy(), expected)
    assert np.array_equal(scales.numpy(), expected_scales)
    exact = weight.double().numpy()
    error = exact - fp8_oracle.dequantized(expected, expected_scales)
    assert squares(weight, values, scales).tolist() == pytest.approx([np.square(error).sum(), np.square(exact).sum()])
    tall = torch.randn(16 * ROWS, 256)
    results = tall.numel() + tall.numel() // BLOCK**2 * 4
    part = 4 * ROWS * 256  # in float32
    assert peak_bytes(lambda: quantized(tall)) < results + 6 * part
    assert peak_bytes(lambda: squares(tall, *quantized(tall))) < results + 6 * part


def test_a_block_of_zeros_stays_one_and_does_not_touch_its_neighbours():
    weight = torch.ones(128, 256)
    weight[:, :128] = 0
    values, scales = quantized(weight)
    assert scales.tolist() == [[SMALLEST_SCALE, torch.tensor(1 / 448).item()]]
    assert values.float()[:, :128].eq(0).all() and values.float()[:, 128:].eq(448).all()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_shows_in_the_scale_of_its_block(number):
    weight = torch.ones(200, 200)
    weight[150, 3] = number
    _, scales = quantized(weight)
    assert scales.isfinite().tolist() == [[True, True], [False, True]]


def test_the_sums_of_a_block_computed_by_hand():
    """The largest weight is 448, so the scale is 1. 17 lies between 16 and 18; 16 has the even byte, an
    error of 1."""
    weight = torch.zeros(3, 5)
    weight[0, 0], weight[2, 4] = 448.0, 17.0
    values, scales = quantized(weight)
    assert scales.item() == 1.0 and values.float()[2, 4] == 16.0
    assert squares(weight, values, scales).tolist() == [1.0, 448.0**2 + 17.0**2]
