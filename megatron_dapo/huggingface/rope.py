"""Reads the rotary settings of a Hugging Face config.json; names everything unsupported."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class RopeScaling:
    """The difference of rotary frequencies from theta^(-2i/d), in the words of config.json.

    linear: all are divided by `factor`. llama3 (arXiv 2407.21783) and yarn (arXiv 2309.00071): only
    long wavelengths are, with a smooth passage. `models.attention.rotary` has the formulas.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_positions: int = 0  # context length of the pre-training
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # of queries and keys; only yarn has one


@dataclass(frozen=True)
class Rope:
    """The rotary settings of a model."""

    theta: float = DEFAULT_THETA  # base of the frequencies
    scaling: RopeScaling | None = None  # None for plain frequencies
    share: float = 1.0  # rotated share of a head's dimensions


def read_rope(
    hf: Mapping[str, Any], source: str, partial: bool = False, latent: bool = False
) -> tuple[Rope, list[str]]:
    """Return the rotary settings, and the faults found; with faults the settings mean nothing.

    The settings of config.json are under their new name (rope_parameters) or their old one
    (rope_scaling). partial: the family may rotate a part of a head's dimensions. latent: its
    attention is latent (MLA). There yarn multiplies the products of queries and keys as a whole,
    not their rotated dimensions.
    """
    rope, wrong = _block(hf, source)
    if rope.get("partial_rotary_factor") is None:
        rope = rope | {"partial_rotary_factor": hf.get("partial_rotary_factor")}
    kind = rope.get("rope_type", rope.get("type", "default"))
    kinds = _LATENT_KINDS if latent else _KINDS
    if kind not in kinds:
        wrong = [f"{source}: rope type `{kind}` is not supported; supported are {', '.join(kinds)}"]
    if wrong:
        return Rope(), wrong
    rules, make = kinds[kind]
    rules = _EVERY_KIND | ({"partial_rotary_factor": _SHARE} if partial else {}) | rules
    wrong = [
        f"{source}: {kind} rope `{key}: {json.dumps(rope.get(key))}` is not supported; it must be {what}"
        for key, (what, is_good) in rules.items()
        if not is_good(rope.get(key))
    ]
    if kind == "llama3" and not wrong and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        wrong = [f"{source}: llama3 rope `high_freq_factor: {rope['high_freq_factor']}` is not above low_freq_factor"]
    if wrong:
        return Rope(), wrong
    if latent and kind == "yarn" and rope["mscale"] != rope["mscale_all_dim"]:
        return Rope(), [f"{source}: yarn rope `mscale: {rope['mscale']}` is not mscale_all_dim, as it must be here"]
    theta = rope.get("rope_theta") or hf.get("rope_theta") or DEFAULT_THETA
    scaling, share = make(rope), rope["partial_rotary_factor"] or 1.0
    if scaling is not None and scaling.attention_factor != 1 and share < 1:
        # the factor multiplies only the rotated dimensions, so it is no scale of the attention
        return Rope(), [f"{source}: {kind} rope with `partial_rotary_factor: {share}` is not supported"]
    return Rope(theta, scaling, share), []


def _block(hf: Mapping[str, Any], source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the settings, and the reasons against reading them."""
    blocks = {name: hf[name] for name in ("rope_parameters", "rope_scaling") if hf.get(name)}
    if wrong := [
        f"{source}: `{name}: {json.dumps(rope)}` is not one object with the settings of all layers"
        for name, rope in blocks.items()
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values())
    ]:
        return {}, wrong
    if len(blocks) == 2 and blocks["rope_parameters"] != blocks["rope_scaling"]:
        return {}, [f"{source}: `rope_parameters` and `rope_scaling` differ; keep the one that is meant"]
    return next(iter(blocks.values()), {}), []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _or_absent(is_good: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_good(value)


_Rules = dict[str, tuple[str, Callable[[object], bool]]]

_NUMBER = ("a number above 0", _is_number)
_NUMBER_OR_ABSENT = ("a number above 0, or absent", _or_absent(_is_number))
_POSITIONS = ("a whole number above 0", _is_size)

_SHARE = ("above 0 and at most 1, or absent", _or_absent(_is_share))
_EVERY_KIND: _Rules = {
    "rope_theta": ("a number above 0", _or_absent(_is_number)),
    "partial_rotary_factor": ("1", lambda value: value in (None, 1.0)),
}
# Libraries take different values for an absent one of these.
_LLAMA3: _Rules = {
    "factor": _NUMBER,
    "low_freq_factor": _NUMBER,
    "high_freq_factor": _NUMBER,
    "original_max_position_embeddings": _POSITIONS,
}
_YARN: _Rules = {
    "factor": _NUMBER,
    "original_max_position_embeddings": _POSITIONS,
    "beta_fast": _NUMBER_OR_ABSENT,
    "beta_slow": _NUMBER_OR_ABSENT,
    "mscale": _NUMBER_OR_ABSENT,
    "mscale_all_dim": _NUMBER_OR_ABSENT,
    "truncate": ("true, false or absent", lambda value: value is None or isinstance(value, bool)),
    # transformers reads only the first of these, SGLang only the other two
    "attention_factor": ("absent", lambda value: value is None),
    "attn_factor": ("1, or absent", lambda value: value in (None, 1.0)),
    "extrapolation_factor": ("1, or absent", lambda value: value in (None, 1.0)),
}


def _linear(rope: dict[str, Any]) -> RopeScaling:
    return RopeScaling("linear", float(rope["factor"]))


def _llama3(rope: dict[str, Any]) -> RopeScaling:
    return RopeScaling(
        "llama3",
        float(rope["factor"]),
        rope["original_max_position_embeddings"],
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
    )


def _yarn(rope: dict[str, Any]) -> RopeScaling:
    factor = float(rope["factor"])
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale is not None and mscale_all_dim is not None:
        attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    else:
        attention_factor = _mscale(factor, 1.0)
    return RopeScaling(
        "yarn",
        factor,
        rope["original_max_position_embeddings"],
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=rope.get("truncate") is not False,
        attention_factor=attention_factor,
    )


def _latent_yarn(rope: dict[str, Any]) -> RopeScaling:
    """Return the scaling with the factor of DeepSeek's own code.

    The factor of only the rotated dimensions is 1, because both settings are the same.
    """
    return replace(_yarn(rope), attention_factor=_mscale(float(rope["factor"]), rope["mscale_all_dim"]))


def _mscale(factor: float, mscale: float) -> float:
    """Return 0.1 mscale ln(factor) + 1, and 1 for a factor up to 1 (arXiv 2309.00071, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


_KINDS: dict[str, tuple[_Rules, Callable[[dict[str, Any]], RopeScaling | None]]] = {
    "default": ({}, lambda rope: None),
    "linear": ({"factor": _NUMBER}, _linear),
    "llama3": (_LLAMA3, _llama3),
    "yarn": (_YARN, _yarn),
}
# SGLang takes all but the default for yarn, and its own rounding of the borders. Absent factors
# differ from library to library. The last two switch off SGLang's factor of all products, and
# nothing in transformers.
_LATENT_YARN: _Rules = {
    **_YARN,
    "mscale": _NUMBER,
    "mscale_all_dim": _NUMBER,
    "truncate": ("true or absent", lambda value: value in (None, True)),
    "apply_yarn_scaling": ("true or absent", lambda value: value in (None, True)),
    "apply_scale": ("true or absent", lambda value: value in (None, True)),
}
_LATENT_KINDS = {"default": _KINDS["default"], "yarn": (_LATENT_YARN, _latent_yarn)}
