"""Reads which layers of a model see a window of tokens alone, and their rotary settings; says what is not supported."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dapo.huggingface.rope import read_rope

GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""What config.json calls layers that see all tokens before a token, and those that see a window."""

GLOBAL_THETA = 1e6
"""The base of the rotary frequencies of global layers, where it is absent; of local ones it is that of other models."""


@dataclass(frozen=True)
class Windows:
    """Layers whose tokens see the last `size` tokens alone, themselves included.

    is_local: whether a layer is one of them, for all layers of the model. rope_theta: the base of their rotary
    frequencies, which are not scaled; none = theirs are those of the other layers.
    """

    size: int
    is_local: tuple[bool, ...]
    rope_theta: float | None


def read_windows(hf: Mapping[str, Any], source: str, has_local_rope: bool) -> tuple[Windows | None, list[str]]:
    """Return which layers of a Gemma 3 or gpt-oss see a window alone, and what is wrong there. The types are checked
    already. has_local_rope: these layers have rotary settings of their own, as in Gemma 3."""
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
    rope, problems = read_rope(of_local_layers(hf), source)
    if rope.scaling is not None:
        problems = [f"{source}: {rope.scaling.kind} rope of {LOCAL} is not supported, which SGLang does not scale"]
    if wrong or problems:
        return None, wrong + problems
    return Windows(hf["sliding_window"], is_local, rope.theta), []


def of_global_layers(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json of a model with both kinds of layers as it were if all were global: either rope_parameters has
    a block for each kind, or rope_theta and rope_scaling are those of global layers."""
    rope = {"rope_parameters": _of_kind(hf, GLOBAL), "rope_scaling": None} if _is_by_kind(hf) else {}
    return {**hf, **rope, "rope_theta": hf.get("rope_theta") or GLOBAL_THETA}


def of_local_layers(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings of config.json as they were if all layers were local."""
    return {"rope_theta": hf.get("rope_local_base_freq"), "rope_parameters": _of_kind(hf, LOCAL)}


def _of_kind(hf: Mapping[str, Any], kind: str) -> Any:
    return hf["rope_parameters"].get(kind) if _is_by_kind(hf) else None


def _is_by_kind(hf: Mapping[str, Any]) -> bool:
    rope = hf.get("rope_parameters")
    return isinstance(rope, dict) and bool({GLOBAL, LOCAL} & rope.keys())
