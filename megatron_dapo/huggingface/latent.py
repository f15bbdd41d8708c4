"""Reads the sizes of multi-head latent attention from a Hugging Face config.json.

It names everything unsupported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Fields of config.json; the first may be null."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA): little is kept of a token.

    DeepSeek-V2, arXiv 2405.04434, section 2.1. Keys and values of all heads are products of one
    normed vector per token. A key's rotated dimensions are beside it, the same for all heads.
    Queries are products of another vector.
    """

    q_rank: int | None
    """Width of the vector of the queries; None for queries from the hidden states."""
    kv_rank: int
    """Width of the vector of keys and values."""
    plain_dim: int
    """Dimensions of a head of queries and keys without rotation."""
    rotary_dim: int
    """Rotated dimensions of a key."""
    value_dim: int
    """Dimensions of a head of values."""

    @property
    def key_dim(self) -> int:
        """Return the dimensions of a head of queries and keys."""
        return self.plain_dim + self.rotary_dim

    @property
    def down_width(self) -> int:
        """Return the width of the product of the hidden states: both vectors, and rotated keys."""
        return (self.q_rank or 0) + self.kv_rank + self.rotary_dim


def read_latent(hf: Mapping[str, Any], source: str) -> tuple[LatentAttention | None, list[str]]:
    """Return the sizes, and the faults found. The types are checked already."""
    wrong = [f"{source}: `{key}` is missing" for key in LATENT_SIZES[1:] if hf.get(key) is None]
    heads, key_heads = hf.get("num_attention_heads"), hf.get("num_key_value_heads")
    if key_heads not in (None, heads):
        wrong.append(f"{source}: `num_key_value_heads: {key_heads}` is not num_attention_heads {heads}")
    if (hf.get("qk_rope_head_dim") or 0) % 2:
        wrong.append(f"{source}: `qk_rope_head_dim: {hf['qk_rope_head_dim']}` is not even")
    if hf.get("v_head_dim") and not wrong and hf["v_head_dim"] > hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]:
        wrong.append(f"{source}: `v_head_dim: {hf['v_head_dim']}` is above qk_nope_head_dim + qk_rope_head_dim")
    if wrong:
        return None, wrong
    sizes = {key: hf[key] for key in LATENT_SIZES}
    return LatentAttention(*sizes.values()), []
