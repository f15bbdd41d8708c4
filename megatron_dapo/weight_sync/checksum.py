"""The servers' tensor checksums, computed on the trainer's side: equal exactly where the bits are equal.

SGLang's `weights_checker` gives a checksum per parameter on CPU and GPU alike (its other readings do not do: `compare`
needs CUDA, `get_weights_by_name` knows few models and cuts long tensors). Its parameters are fused
and cut by the server's tensor parallelism, so the trainer's tensors are brought into that form first.
"""

import hashlib
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dapo.models.safetensors_files import TensorSpec
from megatron_dapo.models.weight_map import ROUTER_BIAS

VOCAB_MULTIPLE = 64
"""A server pads the vocabulary to a multiple of this with zero rows."""

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.fused_qkv_a_proj_with_mqa": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.shared_experts.gate_up_proj": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
}
"""Server module -> the Hugging Face modules stacked in it, in order."""

LATENT_KEYS = "self_attn.kv_b_proj.weight"
"""The end of a name that only models with latent attention have."""

EXPERT = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<number>\d+)\.(?P<module>gate_proj|up_proj|down_proj)\.weight")
EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""Server parameter of a layer's experts -> the Hugging Face modules of an expert stacked in it, expert by expert."""

EXPERTS_IN_ONE = {
    "gate_up_proj": ("w13_weight", 2),
    "gate_up_proj_bias": ("w13_weight_bias", 1),
    "down_proj": ("w2_weight", 1),
    "down_proj_bias": ("w2_weight_bias", None),
}
"""Tensor of all experts of a layer, [E, in, out] or [E, out] -> (server parameter, [E, out, in] or [E, out]; the axis
of the tensor that a server's tensor parallelism cuts, none where the first rank has it whole and the others zeros)."""

SINKS = "self_attn.sinks"

CUT = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "q_b_proj": 0,
    "kv_b_proj": 0,
    "gate_proj": 0,
    "up_proj": 0,
    "o_proj": 1,
    "down_proj": 1,
    "embed_tokens": 0,
    "lm_head": 0,
}
"""Module -> the axis that a server's tensor parallelism cuts; modules not named are whole on every rank."""

STACKED = {"gate_up_proj": 2}
"""Module -> how many tensors of one size stand in its weight one below the other, each of which is cut by rows."""

PADDED = ("embed_tokens", "lm_head")
KEY_VALUE = ("k_proj", "v_proj")


def server_parameters(specs: Sequence[TensorSpec]) -> dict[str, tuple[TensorSpec, ...]]:
    """Return, by server parameter name, the tensors that each parameter is made of, in order. Their types are those of
    the server: it holds the weight of a router with a bias in float32, as the bias itself, but for DeepSeek-V3's; the
    biases of experts in float32, and attention sinks in bfloat16."""
    by_name = {spec.name: spec for spec in specs}
    is_latent = any(name.endswith(LATENT_KEYS) for name in by_name)
    result: dict[str, tuple[TensorSpec, ...]] = {}
    experts: dict[str, list[re.Match]] = {}
    for spec in specs:
        if expert := EXPERT.fullmatch(spec.name):
            stacked = next(name for name, modules in EXPERTS.items() if expert["module"] in modules)
            experts.setdefault(f"{expert['experts']}.{stacked}", []).append(expert)
            continue
        module, _, kind = spec.name.rpartition(".")
        if in_one := _experts_in_one(spec.name):
            server_kind, _ = in_one
            dtype = torch.float32 if kind.endswith("_bias") else spec.dtype
            result[f"{module}.{server_kind}"] = (replace(spec, dtype=dtype),)
            continue
        if spec.name.endswith(SINKS):
            result[spec.name] = (replace(spec, dtype=torch.bfloat16),)
            continue
        if fused := _fused(module, kind, by_name):
            name, stacked_names = fused
            result[name] = tuple(by_name[stacked_name] for stacked_name in stacked_names)
            continue
        has_bias = kind == "weight" and f"{module}.{ROUTER_BIAS.rpartition('.')[2]}" in by_name
        result[spec.name] = (replace(spec, dtype=torch.float32) if has_bias and not is_latent else spec,)
    for name, parts in experts.items():
        modules = EXPERTS[name.rpartition(".")[2]]
        parts.sort(key=lambda part: (int(part["number"]), modules.index(part["module"])))
        result[name] = tuple(by_name[part.string] for part in parts)
    return result


def _fused(module: str, kind: str, by_name: Container[str]) -> tuple[str, list[str]] | None:
    """Return (server parameter, the tensors stacked in it) of a module's; none where the server has it alone, as the
    queries of a latent attention that come from the hidden states."""
    for fused, parts in FUSED.items():
        if part := next((part for part in parts if module.endswith(part)), None):
            prefix = module.removesuffix(part)
            names = [f"{prefix}{each}.{kind}" for each in parts]
            return (f"{prefix}{fused}.{kind}", names) if all(name in by_name for name in names) else None
    return None


def _experts_in_one(name: str) -> tuple[str, int | None] | None:
    """Return the row of EXPERTS_IN_ONE of a tensor that has all experts of its layer."""
    module, _, kind = name.rpartition(".")
    return EXPERTS_IN_ONE.get(kind) if module.endswith("mlp.experts") else None


def server_tensor(
    specs: Sequence[TensorSpec], tensors: Sequence[Tensor], tp_rank: int, tp_size: int, num_kv_heads: int | None = None
) -> Tensor:
    """Return the parameter that rank tp_rank of a server with tp_size ranks holds, from the full tensors it is made of.

    num_kv_heads matters where tp_size is larger: then several ranks hold the same key and value heads.
    """
    slices = [
        _slice(spec.name, tensor.to(spec.dtype), tp_rank, tp_size, num_kv_heads)
        for spec, tensor in zip(specs, tensors, strict=True)
    ]
    return slices[0] if len(slices) == 1 else torch.cat(slices)


def accepted_tensors(
    specs: Sequence[TensorSpec], tensors: Sequence[Tensor], tp_rank: int, tp_size: int, num_kv_heads: int | None = None
) -> Iterator[Tensor]:
    """Yield the forms in which that rank may hold the parameter: `server_tensor`; a vocabulary's table also whole and
    without padding, as SGLang's Gemma 3 has it on each rank; sinks also in float32, as the kernels of a B200 want."""
    yield server_tensor(specs, tensors, tp_rank, tp_size, num_kv_heads)
    if specs[0].name.endswith(SINKS):
        yield server_tensor([replace(specs[0], dtype=torch.float32)], tensors, tp_rank, tp_size)
    if specs[0].name.split(".")[-2] in PADDED:
        yield tensors[0]


def _slice(name: str, tensor: Tensor, tp_rank: int, tp_size: int, num_kv_heads: int | None) -> Tensor:
    if in_one := _experts_in_one(name):
        return _slice_of_experts(tensor, tp_rank, tp_size, in_one[1])
    if name.endswith(SINKS):
        return tensor.chunk(tp_size)[tp_rank]
    module = name.split(".")[-2]
    if module in STACKED:
        return torch.cat([part.chunk(tp_size)[tp_rank] for part in tensor.chunk(STACKED[module])])
    axis = CUT.get(module)
    if axis is None or axis >= tensor.dim():  # a bias of a row-parallel layer is whole
        return tensor
    if module in PADDED:
        tensor = _pad_vocabulary(tensor, tp_size)
    parts = tp_size
    index = tp_rank
    if module in KEY_VALUE and num_kv_heads is not None and num_kv_heads < tp_size:
        parts = num_kv_heads
        index = tp_rank * num_kv_heads // tp_size
    return tensor.chunk(parts, dim=axis)[index]


def _slice_of_experts(tensor: Tensor, tp_rank: int, tp_size: int, axis: int | None) -> Tensor:
    if axis is None:  # each rank adds its bias to its part of a sum
        return tensor if tp_rank == 0 else torch.zeros_like(tensor)
    part = tensor.chunk(tp_size, dim=axis)[tp_rank]
    return part.transpose(1, 2) if part.dim() == 3 else part


def _pad_vocabulary(tensor: Tensor, tp_size: int) -> Tensor:
    rows = tensor.shape[0]
    missing = -rows % VOCAB_MULTIPLE
    if (rows + missing) % tp_size:
        missing = -rows % (VOCAB_MULTIPLE * tp_size)
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


def checksum(tensor: Tensor) -> str:
    """Return what `weights_checker` reports for this tensor on a server of the same kind of device."""
    return gpu_checksum(tensor) if tensor.is_cuda else cpu_checksum(tensor)


def cpu_checksum(tensor: Tensor) -> str:
    """Return the first 8 bytes of SHA-256 over the tensor's bytes, in hexadecimal."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()[:16]


def gpu_checksum(tensor: Tensor) -> str:
    """Return SGLang's hash of a GPU tensor (its kernels.ops.memory.gpu_tensor_hash), in hexadecimal. It is computed in
    tensor operations, which work on any device."""
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
    """Return one half of each tile's hash as [tiles] int64, for words from position `start` on. `which` is 0 for the
    upper half and 1 for the lower half."""
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
