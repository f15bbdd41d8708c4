"""The servers' tensor checksums, computed on the trainer's side: equal exactly for equal bits.

SGLang's `weights_checker` gives a checksum per parameter on CPU and GPU alike. Its other readings
do not do: `compare` needs CUDA, `get_weights_by_name` knows few models and cuts long tensors. Its
parameters are fused and cut by the server's tensor parallelism. The trainer's tensors are brought
into that form first (`TensorSpec.served`, from the weight rows of the family).
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dapo.huggingface.model_tensors import ServedTensor
from megatron_dapo.huggingface.weight_rows import EMBEDDING, LM_HEAD
from megatron_dapo.models.safetensors_files import TensorSpec
from megatron_dapo.weight_sync.fp8_blocks import dequantized

VOCABULARY = (EMBEDDING, LM_HEAD)
VOCABULARY_MULTIPLE = 64
"""A server pads the vocabulary to a multiple of this with zero rows."""


def server_parameters(specs: Iterable[TensorSpec]) -> dict[str, tuple[TensorSpec, ...]]:
    """Return, by server parameter name, the tensors that each parameter is made of, in order, in
    the server's types."""
    parameters: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        parameters.setdefault(_served(spec).parameter, []).append(_in_type(spec, 0))
    return {name: tuple(sorted(members, key=_place)) for name, members in parameters.items()}


def _place(spec: TensorSpec) -> tuple[tuple[int, int], bool]:
    return _served(spec).place, _served(spec).is_scale


def _served(spec: TensorSpec) -> ServedTensor:
    return spec.served or ServedTensor(spec.name)


def _in_type(spec: TensorSpec, choice: int) -> TensorSpec:
    """Return the tensor in one of a server's possible types."""
    types = _served(spec).types
    return replace(spec, dtype=getattr(torch, types[choice])) if types else spec


def server_tensor(specs: Sequence[TensorSpec], tensors: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
    """Return the parameter that rank tp_rank of a server with tp_size ranks holds, from the full
    tensors it is made of.

    FP8 blocks with their scales count as the bfloat16 weights they stand for: of these SGLang makes
    its checksum.
    """
    held: list[Tensor] = []
    for spec, tensor in zip(specs, tensors, strict=True):
        part = _slice(spec, tensor.to(spec.dtype), tp_rank, tp_size)
        if _served(spec).is_scale:
            held[-1] = dequantized(held[-1], part).bfloat16()
        else:
            held.append(part)
    return _joined(held)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # no copy of a large single one


def accepted_tensors(
    specs: Sequence[TensorSpec], tensors: Sequence[Tensor], tp_rank: int, tp_size: int
) -> Iterator[Tensor]:
    """Yield that rank's possible forms of the parameter, one for each type.

    Of a vocabulary's table also the whole without padding: SGLang's Gemma 3 has it on each rank.
    """
    for choice in range(max(1, len(_served(specs[0]).types))):
        yield server_tensor([_in_type(spec, choice) for spec in specs], tensors, tp_rank, tp_size)
    if specs[0].name in VOCABULARY:
        yield tensors[0]


def _slice(spec: TensorSpec, tensor: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    """Return the part of a tensor that a rank of a server holds."""
    served = _served(spec)
    if served.on_first_rank:
        return tensor if tp_rank == 0 else torch.zeros_like(tensor)
    if spec.name in VOCABULARY:
        tensor = _pad_vocabulary(tensor, tp_size)
    if served.cut is not None:
        blocks = tensor.split(served.blocks) if served.blocks else [tensor]
        tensor = _joined([_share(block, served, tp_rank, tp_size) for block in blocks])
    return tensor.transpose(-1, -2) if served.is_transposed else tensor


def _share(block: Tensor, served: ServedTensor, tp_rank: int, tp_size: int) -> Tensor:
    """Return a rank's share of a tensor, or of a tensor inside it."""
    assert served.cut is not None, "the tensor is cut"
    num_shares = min(tp_size, block.size(served.cut) // served.unit)
    return block.chunk(num_shares, dim=served.cut)[tp_rank * num_shares // tp_size]


def _pad_vocabulary(tensor: Tensor, tp_size: int) -> Tensor:
    rows = tensor.shape[0]
    missing = -rows % VOCABULARY_MULTIPLE
    if (rows + missing) % tp_size:
        missing = -rows % (VOCABULARY_MULTIPLE * tp_size)
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


def checksum(tensor: Tensor) -> str:
    """Return the `weights_checker` checksum of this tensor on a server of its kind of device."""
    return gpu_checksum(tensor) if tensor.is_cuda else _cpu_checksum(tensor)


def _cpu_checksum(tensor: Tensor) -> str:
    """Return the first 8 bytes of SHA-256 over the tensor's bytes, in hexadecimal."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()[:16]


def gpu_checksum(tensor: Tensor) -> str:
    """Return SGLang's hash of a GPU tensor (kernels.ops.memory.gpu_tensor_hash), in hexadecimal.

    It is computed in tensor operations for any device.
    """
    return f"{_tiled_hash(tensor):016x}"


# Per tile two sums, over 32-bit words, of murmur3's finaliser keyed by position;
# the total of the tiles; splitmix64.
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITION_FACTORS = (0x27D4EB2D, 0x165667B1)
_POSITION_ROTATIONS = (15, 13)
_TILE_WORDS = 8192
_TILES_AT_ONCE = 512  # bounds the scratch memory: 512 x 8192 words as int64 are 32 MB
_U32, _U64 = 2**32 - 1, 2**64 - 1


def _fmix32(x: Tensor) -> Tensor:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & _U32
    return x ^ (x >> 16)


def _tiled_hash(tensor: Tensor) -> int:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not data.numel():
        return 0
    data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
    words = data.view(torch.int32)
    total = 0
    for start in range(0, words.numel(), _TILE_WORDS * _TILES_AT_ONCE):
        part = words[start : start + _TILE_WORDS * _TILES_AT_ONCE].to(torch.int64) & _U32
        high, low = (_tile_sums(part, start, which, words.numel()) for which in (0, 1))
        # 32-bit halves add up separately: no int64 overflow, the carry is Python's
        total += (int(high.sum()) << 32) + int(low.sum())
    return _splitmix64(total & _U64)


def _tile_sums(words: Tensor, start: int, which: int, num_words: int) -> Tensor:
    """Return one half of each tile's hash as [tiles] int64, for words from position `start` on.
    `which` is 0 for the upper half and 1 for the lower half."""
    position = torch.arange(start, start + words.numel(), device=words.device) & _U32
    rotation = _POSITION_ROTATIONS[which]
    rotated = ((position << rotation) | (position >> (32 - rotation))) & _U32
    key = ((position * _POSITION_FACTORS[which] + _SEEDS[which]) & _U32) ^ rotated
    mixed = _fmix32(words ^ key)
    padded = torch.cat([mixed, mixed.new_zeros(-mixed.numel() % _TILE_WORDS)])
    return _fmix32((padded.view(-1, _TILE_WORDS).sum(dim=1) & _U32) ^ (num_words * 4 & _U32))


def _splitmix64(x: int) -> int:
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & _U64
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & _U64
    return x ^ (x >> 31)
