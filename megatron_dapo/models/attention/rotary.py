"""Rotary positions from the beginning of each segment, computed on the device.

Nothing is read back to the host. Without Transformer Engine, Megatron reads the segments' offsets
back for the query and for the key of every layer. It also keeps tables of cosines and sines for
each of them until the backward pass.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.rope import RopeScaling


class Rotary:
    """Rotates queries and keys by their position. One object serves all layers of a model chunk.

    Cosines and sines are rounded to the query's type, as in Megatron and in Hugging Face's models.
    """

    def __init__(self, spec: ModelSpec, device: torch.device | str) -> None:
        self.frequencies = rotary_frequencies(spec).to(device)
        self._tables_of: tuple | None = None
        self._tables: tuple[Tensor, Tensor] = (self.frequencies, self.frequencies)  # placeholders

    def __call__(
        self, query: Tensor, key: Tensor, cu_seqlens: Tensor | None, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return both rotated.

        [T, heads, dim] with the segments' offsets, or [S, B, heads, dim] without, position 0 first.
        places: of the given tokens, if they are a part of their row.
        """
        tables = self._of(query, cu_seqlens, places)
        cos, sin = (table.view(len(table), *[1] * (query.dim() - 2), -1) for table in tables)
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    def _of(self, query: Tensor, cu_seqlens: Tensor | None, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [T, dim].

        The last micro-batch's are kept, because its layers ask one after the other.
        """
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
    """Return each token's place in its segment from its place in the row, int64.

    cu_seqlens: [segments + 1], from 0 to the row's length; None for one segment.
    """
    if cu_seqlens is None:
        return places
    return places - cu_seqlens[torch.searchsorted(cu_seqlens, places, right=True) - 1]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with each pair rotated.

    The two halves of the tables' last axis hold the pairs' two coordinates, and so do those of
    equally many dimensions of x. The remaining dimensions of x stay as they are.
    """
    rotated, rest = x.split([cos.size(-1), x.size(-1) - cos.size(-1)], dim=-1)
    half = rotated.size(-1) // 2
    turned = rotated * cos + torch.cat((-rotated[..., half:], rotated[..., :half]), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.size(-1) else turned


def rotary_frequencies(spec: ModelSpec) -> Tensor:
    """Return the angle per position of each pair of rotated dimensions, [rotary_dim / 2] float32.

    theta^(-2i/d), scaled by config.json. The order of operations is that of transformers and
    SGLang, so that no bit differs: at position 100 000 the last bit of a frequency is a hundredth
    of a radian.
    """
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    positions_per_radian = spec.rope_theta**exponents
    if spec.rope_scaling is None:
        return 1.0 / positions_per_radian
    return _SCALED[spec.rope_scaling.kind](positions_per_radian, spec.rope_scaling, spec)


def attention_scale(spec: ModelSpec) -> float:
    """Return the factor of products of query and key: 1 / sqrt(head_dim) as a rule.

    yarn multiplies both by its attention factor, and so the product by the square (arXiv
    2309.00071, eq. 21 and 22).
    """
    factor = spec.rope_scaling.attention_factor if spec.rope_scaling else 1.0
    return factor**2 / math.sqrt(spec.attention_dim or spec.head_dim)


def _linear(positions_per_radian: Tensor, scaling: RopeScaling, spec: ModelSpec) -> Tensor:
    """Divide all frequencies, which is to divide the positions (arXiv 2306.15595)."""
    return 1.0 / positions_per_radian / scaling.factor


def _llama3(positions_per_radian: Tensor, scaling: RopeScaling, spec: ModelSpec) -> Tensor:
    """Divide slow frequencies, keep fast ones, and go from one to the other in between.

    Slow: less than low_freq_factor turns in the original positions. Fast: more than
    high_freq_factor turns. Source: Llama 3.1's own code.
    """
    frequencies = 1.0 / positions_per_radian
    turns = scaling.original_positions / (2 * math.pi / frequencies)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(positions_per_radian: Tensor, scaling: RopeScaling, spec: ModelSpec) -> Tensor:
    """Keep fast frequencies, divide slow ones, and go from one to the other in between.

    Fast: more than beta_fast turns in the original positions. Slow: less than beta_slow turns. The
    passage is linear in the number of the pair (arXiv 2309.00071, section 3.2).
    """
    first = _pair_that_turns(scaling.beta_fast, scaling, spec)
    last = _pair_that_turns(scaling.beta_slow, scaling, spec)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.rotary_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(spec.rotary_dim // 2, dtype=torch.float32)
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    divided = 1.0 / (scaling.factor * positions_per_radian)
    return divided * (1 - kept) + (1.0 / positions_per_radian) * kept


def _pair_that_turns(times: float, scaling: RopeScaling, spec: ModelSpec) -> float:
    """Return the number, a fraction, of the pair with so many turns in the original positions."""
    return (spec.rotary_dim * math.log(scaling.original_positions / (times * 2 * math.pi))) / (
        2 * math.log(spec.rope_theta)
    )


_SCALED: dict[str, Callable[[Tensor, RopeScaling, ModelSpec], Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
