"""Reads a model's layers with a window of tokens, and their rotary settings.

It names everything unsupported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dapo.huggingface.rope import read_rope

GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""config.json's names of layers with all tokens before a token, and of layers with a window."""

GLOBAL_THETA = 1e6
"""Default base of global layers' rotary frequencies; local ones have other models' default."""


@dataclass(frozen=True)
class Windows:
    """Layers with a view of only the last `size` tokens, the current one included."""

    size: int
    is_local: tuple[bool, ...]  # whether a layer has a window, for all layers of the model
    rope_theta: float | None
    """Base of their unscaled rotary frequencies; None for the other layers' frequencies."""


def read_windows(hf: Mapping[str, Any], source: str, has_local_rope: bool) -> tuple[Windows | None, list[str]]:
    """Return the layers of a Gemma 3 or gpt-oss with a window, and the faults found.

    The types are checked already. has_local_rope: these layers have rotary settings of their own,
    as in Gemma 3.
    """
    num_layers = hf.get("num_hidden_layers") or 0
    kinds = hf.get("layer_types")
    if kinds is None:
        pattern = hf["sliding_window_pattern"] or num_layers + 1
        kinds = [LOCAL if number % pattern else GLOBAL for number in range(1, num_layers + 1)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= {GLOBAL, LOCAL}:
        what = f"a list of {num_layers}, for each layer {GLOBAL} or {LOCAL}"
        return None, [f"{source}: `layer_types: {kinds}` is not supported; it must be {what}"]
    required = ("sliding_window", *(("query_pre_attn_scalar",) if has_local_rope else ()))
    wrong = [f"{source}: `{key}` is missing" for key in required if hf[key] is None]
    is_local = tuple(kind == LOCAL for kind in kinds)
    if not has_local_rope:
        return (None if wrong else Windows(hf["sliding_window"], is_local, None)), wrong
    rope, problems = read_rope(_of_local_layers(hf), source)
    if rope.scaling is not None:
        problems = [f"{source}: {rope.scaling.kind} rope of {LOCAL} is not supported, which SGLang does not scale"]
    if wrong or problems:
        return None, wrong + problems
    return Windows(hf["sliding_window"], is_local, rope.theta), []


def of_global_layers(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of a model with both kinds of layers as if all were global.

    Either rope_parameters has a block for each kind, or rope_theta and rope_scaling are of global
    layers.
    """
    rope = {"rope_parameters": _of_kind(hf, GLOBAL), "rope_scaling": None} if _is_by_kind(hf) else {}
    return {**hf, **rope, "rope_theta": hf.get("rope_theta") or GLOBAL_THETA}


def _of_local_layers(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings of config.json as if all layers were local."""
    return {"rope_theta": hf.get("rope_local_base_freq"), "rope_parameters": _of_kind(hf, LOCAL)}


def _of_kind(hf: Mapping[str, Any], kind: str) -> Any:
    return hf["rope_parameters"].get(kind) if _is_by_kind(hf) else None


def _is_by_kind(hf: Mapping[str, Any]) -> bool:
    rope = hf.get("rope_parameters")
    return isinstance(rope, dict) and bool({GLOBAL, LOCAL} & rope.keys())
