"""Rotary positions that begin anew in every segment, computed on the device: nothing is read back to the host.

Without Transformer Engine, Megatron reads the segments' offsets back to the host for the query and for the key of every
layer, and keeps tables of cosines and sines for each of them until the backward pass.
"""

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dapo.huggingface.model_spec import ModelSpec


class Rotary:
    """Rotates queries and keys by their position. One object serves all layers of a model chunk.

    The frequencies (base, Llama 3's scaling) are Megatron's own; cosines and sines are rounded to the query's type, as
    there and in Hugging Face's models.
    """

    def __init__(self, spec: ModelSpec, config: TransformerConfig) -> None:
        scaling = spec.rope_scaling
        self.frequencies = RotaryEmbedding(
            spec.head_dim,
            1.0,
            rotary_base=spec.rope_theta,
            rope_scaling=scaling is not None,
            **(dict(rope_scaling_factor=scaling.factor) if scaling else {}),
            use_cpu_initialization=config.use_cpu_initialization,
        ).inv_freq
        self._tables_of: tuple | None = None
        self._tables: tuple[Tensor, Tensor] = (self.frequencies, self.frequencies)  # replaced before they are read

    def __call__(
        self, query: Tensor, key: Tensor, cu_seqlens: Tensor | None, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return both rotated. [T, heads, dim] with the segments' offsets, or [S, B, heads, dim] without, position 0
        first. places: of the given tokens in their row, where they are not all of it."""
        tables = self._of(query, cu_seqlens, places)
        cos, sin = (table.view(len(table), *[1] * (query.dim() - 2), -1) for table in tables)
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    def _of(self, query: Tensor, cu_seqlens: Tensor | None, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [T, dim]. Those of the last micro-batch are kept, because its layers ask one after the
        other."""
        wanted = (cu_seqlens, query.size(0), query.dtype)
        if self._tables_of is None or self._tables_of[0] is not cu_seqlens or self._tables_of[1:] != wanted[1:]:
            if places is None:
                places = torch.arange(query.size(0), device=query.device)
            angles = torch.outer(positions(places, cu_seqlens).float(), self.frequencies)
            angles = torch.cat((angles, angles), dim=-1)
            self._tables_of = wanted
            self._tables = (angles.cos().to(query.dtype), angles.sin().to(query.dtype))
        return self._tables


def positions(places: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return each token's place in its segment, from its place in the row, int64. cu_seqlens: [segments + 1], from 0 to
    the row's length; none = one segment."""
    if cu_seqlens is None:
        return places
    return places - cu_seqlens[torch.searchsorted(cu_seqlens, places, right=True) - 1]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with each pair rotated. The two halves of the last axis are the two coordinates of each pair."""
    half = x.size(-1) // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
