"""The weights of a stage as servers with FP8 weights take them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dapo.common.sizes import ceil_div
from megatron_dapo.huggingface.fp8_form import BLOCK, SCALE_ENDING, scales_of
from megatron_dapo.models.safetensors_files import TensorSpec
from megatron_dapo.weight_sync.buckets import Source
from megatron_dapo.weight_sync.fp8_blocks import FP8, quantized, squares
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError


class Fp8Source:
    """A stage's weights, products in FP8 blocks beside their scales.

    Whole tensors are quantized, on the source rank; the servers cut them.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._specs: list[TensorSpec] = []
        self._origin: dict[str, TensorSpec] = {}  # name of a sent tensor -> the trainer's tensor
        self._sums: dict[str, tuple[float, float]] = {}  # by the trainer's tensor, of its last quantization
        for spec in source.specs():
            sent = _sent(spec)
            self._specs += sent
            self._origin |= {each.name: spec for each in sent}

    def specs(self) -> list[TensorSpec]:
        """Return the tensors to send."""
        return list(self._specs)

    def gather(self, specs: list[TensorSpec]) -> list[Tensor] | None:
        """Return full tensors on the stage's source rank, None on the others. Collective as the
        model's own.

        Raises WeightSyncError on the source rank, after all collectives, for NaN or infinity.
        """
        origins = list(dict.fromkeys(self._origin[spec.name] for spec in specs))
        tensors = self._source.gather(origins)
        if tensors is None:
            return None
        values: dict[str, Tensor] = {}
        numbers: dict[str, Tensor] = {}
        for spec in origins:
            weight = tensors.pop(0)  # frees it before the next one
            if len(names := [each.name for each in _sent(spec)]) == 1:
                values[spec.name] = weight
                continue
            blocks, scales = quantized(weight)
            values |= zip(names, (blocks, scales), strict=True)
            numbers[spec.name] = torch.cat([squares(weight, blocks, scales), scales.max()[None].double()])
        self._note(numbers)
        return [values[spec.name] for spec in specs]

    def sums(self) -> tuple[float, float]:
        """Return (sum of squared errors, sum of squared weights) of the tensors quantized here."""
        sums = self._sums.values()
        return math.fsum(error for error, _ in sums), math.fsum(weight for _, weight in sums)

    def _note(self, numbers: dict[str, Tensor]) -> None:
        """Keep the sums of these tensors. numbers: [error, weight, largest scale]; one read of the
        device for all."""
        read = torch.stack(list(numbers.values())).tolist() if numbers else []
        for name, (error, weight, largest) in zip(numbers, read, strict=True):
            if not math.isfinite(largest):
                raise WeightSyncError(f"{name} holds NaN or infinity, which FP8 blocks cannot hold")
            self._sums[name] = error, weight


def relative_error(sums: Sequence[tuple[float, float]]) -> float | None:
    """Return the root of all squared errors over all squared weights; None if nothing was
    quantized. sums: of each rank."""
    error, weight = (math.fsum(column) for column in zip(*sums, strict=True))
    return math.sqrt(error / weight) if weight else None


def _sent(spec: TensorSpec) -> list[TensorSpec]:
    """Return the tensors that stand for one: itself, or its blocks and their scales.

    Scales go with their blocks, in one call: one quantization makes both.
    """
    if spec.served is None or not spec.served.in_blocks:
        return [spec]
    blocks = replace(spec, dtype=FP8, served=replace(spec.served, types=()))
    rows, columns = spec.shape
    shape = (ceil_div(rows, BLOCK), ceil_div(columns, BLOCK))
    scales = TensorSpec(spec.name + SCALE_ENDING, shape, torch.float32, True, scales_of(spec.served))
    return [blocks, scales]
