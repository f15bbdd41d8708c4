"""The gated delta rule of packed segments, and the convolution before it (arXiv 2412.06464).

Per value head, with the state S [K, V] of zeros before a segment, for each token:

    S = exp(g) S;  u = beta (v - S' k);  S = S + k u';  o = S' q

Here it is computed in chunks of tokens, in torch and any float type. GPUs have kernels for half
precision (flash-linear-attention).
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dapo.kernels.row_plan import to_device
from megatron_dapo.models.attention.rotary import positions

CHUNK = 64  # tokens, as in flash-linear-attention
EPSILON = 1e-6  # inside the root of a query's or key's length, unlike F.normalize


@dataclass(frozen=True, eq=False)
class Offsets:
    """The segments of a packed row [T]."""

    on_host: tuple[int, ...]
    """Their bounds, from 0 to T."""
    on_device: Tensor
    """The same, int32."""


def has_kernels(x: Tensor) -> bool:
    """Return whether the kernels compute with this tensor (`delta_kernels.py`)."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def causal_conv(x: Tensor, weight: Tensor, offsets: Offsets) -> Tensor:
    """Return silu of the depthwise causal convolution of [T, C] with [C, 1, W].

    Before a segment are zeros. Products and SiLU are in float32, rounded once.
    """
    weight = weight.squeeze(1)
    if has_kernels(x):
        from fla.modules.causal_conv1d import causal_conv1d

        return causal_conv1d(x[None], weight, activation="silu", **_packed(offsets))[0][0]
    kind = torch.promote_types(x.dtype, torch.float32)
    wide, weight = x.to(kind), weight.to(kind)
    place = positions(torch.arange(x.size(0), device=x.device), offsets.on_device)[:, None]
    width = weight.size(1)
    total = wide * weight[:, width - 1]
    for back in range(1, width):
        shifted = F.pad(wide, (0, 0, back, 0))[: x.size(0)]
        total = total + torch.where(place >= back, shifted, 0) * weight[:, width - 1 - back]
    return F.silu(total).to(x.dtype)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, offsets: Offsets
) -> Tensor:
    """Return [T, value heads, V]: what each token reads from its head's state.

    Args:
        query, key: [T, key heads, K], of any length; each serves neighbouring value heads.
        value: [T, value heads, V].
        log_decay: g, [T, value heads], at most 0.
        beta: [T, value heads], the share of a key's old value that is replaced.
    """
    if has_kernels(query):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        tensors = (tensor[None] for tensor in (query, key, value, log_decay, beta))
        return chunk_gated_delta_rule(*tensors, use_qk_l2norm_in_kernel=True, **_packed(offsets))[0][0]
    kind = torch.promote_types(query.dtype, torch.float32)
    repeat = value.size(1) // query.size(1)
    query, key = (_of_length_1(x.to(kind)).repeat_interleave(repeat, 1) for x in (query, key))
    chunks = _chunks(offsets.on_host, query.device)
    parts = (
        chunks.cut(x.to(kind))
        for x in (query * query.size(-1) ** -0.5, key, value, log_decay[..., None], beta[..., None])
    )
    return chunks.join(_by_chunks(chunks.is_first, *parts)).to(value.dtype)


def _by_chunks(
    is_first: tuple[bool, ...], query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """Return [N, heads, C, V] of N chunks of C tokens, each [N, heads, C, ...].

    Within a chunk, the tokens' corrections u depend on each other by a triangular system.
    is_first: whether a chunk begins a segment.
    """
    total = log_decay.cumsum(2)
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).tril()
    # the difference of future tokens is positive, and its exponential may be infinite
    decay = (total - total.transpose(2, 3)).masked_fill(~past, float("-inf")).exp()
    system = (beta * key @ key.transpose(2, 3)) * decay  # below its diagonal; ones are on it
    right = torch.cat([beta * value, beta * key * total.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    of_values, of_states = solved.split([value.size(-1), key.size(-1)], dim=-1)
    scores = (query @ key.transpose(2, 3)) * decay
    last = total[:, :, -1:]
    query, key, last = query * total.exp(), key * (last - total).exp(), last.exp()
    outputs = []
    state = key.new_zeros(())
    for number, begins in enumerate(is_first):
        if begins:
            state = key.new_zeros(key.size(1), key.size(-1), value.size(-1))
        update = of_values[number] - of_states[number] @ state
        outputs.append(query[number] @ state + scores[number] @ update)
        state = state * last[number] + key[number].transpose(1, 2) @ update
    return torch.stack(outputs)


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


@dataclass(frozen=True, eq=False)
class _Chunks:
    """A row's tokens in chunks: a segment's last one is padded by tokens of zeros."""

    order: Tensor
    """[N x C] int64, places in the row; T for padding."""
    inverse: Tensor
    """[T] int64, places in the chunks."""
    is_first: tuple[bool, ...]
    """[N], whether a chunk begins a segment."""

    def cut(self, row: Tensor) -> Tensor:
        """Return [N, heads, C, ...] of [T, heads, ...]."""
        padded = torch.cat([row, row.new_zeros(1, *row.shape[1:])])
        return padded.index_select(0, self.order).unflatten(0, (-1, CHUNK)).transpose(1, 2)

    def join(self, chunks: Tensor) -> Tensor:
        """Return [T, heads, ...] of [N, heads, C, ...]."""
        return chunks.transpose(1, 2).flatten(0, 1).index_select(0, self.inverse)


# The layers of a model ask one after the other; in a pipeline, a few micro-batches take turns.
@lru_cache(maxsize=16)
def _chunks(bounds: tuple[int, ...], device: torch.device) -> _Chunks:
    num_tokens = bounds[-1]
    spans = [
        (at, min(at + CHUNK, end), at == start) for start, end in pairwise(bounds) for at in range(start, end, CHUNK)
    ]
    order = torch.full((len(spans), CHUNK), num_tokens)
    for number, (start, end, _) in enumerate(spans):
        order[number, : end - start] = torch.arange(start, end)
    flat = order.flatten()
    inverse = flat.argsort(stable=True)[:num_tokens]
    return _Chunks(flat.to(device), inverse.to(device), tuple(is_first for _, _, is_first in spans))


def _packed(offsets: Offsets) -> dict[str, Any]:
    """Return the kernels' arguments about segments. Without the last two they would read offsets
    back, and wait for a copy of the chunks."""
    bounds = offsets.on_host
    chunks = _numbers_of_chunks(bounds, offsets.on_device.device)
    return {"cu_seqlens": offsets.on_device, "cu_seqlens_cpu": _host_copy(bounds), "chunk_indices": chunks}


@lru_cache(maxsize=16)
def _host_copy(bounds: tuple[int, ...]) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


@lru_cache(maxsize=16)
def _numbers_of_chunks(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """Return [N, 2]: of each chunk its segment, and its number there."""
    lengths = (end - start for start, end in pairwise(bounds))
    rows = [(segment, chunk) for segment, length in enumerate(lengths) for chunk in range(-(-length // CHUNK))]
    return to_device(np.array(rows).reshape(-1, 2), device)
