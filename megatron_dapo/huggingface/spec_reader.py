"""Reads a Hugging Face config.json into a ModelSpec; names everything unsupported."""

import json
from collections.abc import Callable
from pathlib import Path

from megatron_dapo.common.errors import UserError
from megatron_dapo.huggingface.delta_sizes import ATTENTION_EVERY, DELTA_SIZES, IMAGE_CURE, read_delta_net
from megatron_dapo.huggingface.experts import SHARED_EXPERT, SHARED_MOE_SIZES, read_experts
from megatron_dapo.huggingface.family import Family
from megatron_dapo.huggingface.latent import LATENT_SIZES, read_latent
from megatron_dapo.huggingface.model_families import FAMILIES
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.rope import read_rope
from megatron_dapo.huggingface.windows import of_global_layers, read_windows
from megatron_dapo.storage.model_folder import ModelFolder

LANGUAGE_MODEL, CLASSIFIERS = "ForCausalLM", ("ForTokenClassification", "ForSequenceClassification")
"""Endings of Hugging Face's names of architectures.

The first is of a family's language model, the others are of its body with another head.
"""

IMAGE_MODEL = "ForConditionalGeneration"
"""Ending of the name of an architecture of images and text."""


def read_critic_spec(path: str | Path) -> ModelSpec:
    """Return the ModelSpec of a critic's start: a language model of ours, or a classifier of its
    family.

    Raises as `read_model_spec`.
    """
    return critic_spec(*_read_config(path, "critic.model.path"))


def critic_spec(hf: dict, source: str = "config.json") -> ModelSpec:
    """Return the ModelSpec of a critic from the parsed config.json of its start.

    Raises as `model_spec`.
    """
    names = hf.get("architectures")
    if isinstance(names, list) and names:
        name = str(names[0])
        for ending in CLASSIFIERS:
            name = name.replace(ending, LANGUAGE_MODEL)
        hf = hf | {"architectures": [name]}
    # a critic has a head of its own, tied or not in the language model
    hf = {key: value for key, value in hf.items() if key != "tie_word_embeddings"}
    return model_spec(hf, source).as_critic()


def read_model_spec(path: str | Path) -> ModelSpec:
    """Return the ModelSpec of a checkpoint folder.

    Raises UserError with every unsupported architecture or field.
    """
    return model_spec(*_read_config(path))


def read_vocab_size(path: str | Path) -> int:
    """Return the number of tokens known to the model of a checkpoint folder. Raises UserError."""
    content, source = _read_config(path)
    if not _is_size(content.get("vocab_size")):
        raise UserError(f"actor_rollout_ref.model.path: {source} has no vocab_size; give a whole model.")
    return content["vocab_size"]


def _read_config(path: str | Path, key: str = "actor_rollout_ref.model.path") -> tuple[dict, str]:
    """Return the content of config.json and its path. Raises UserError."""
    folder = ModelFolder.of(path)
    if fault := folder.fault():
        raise UserError(f"{key}: `{path}` {fault}")
    return folder.read_config(), str(folder.config_json)


def model_spec(hf: dict, source: str = "config.json") -> ModelSpec:
    """Return the ModelSpec of a parsed config.json. Raises UserError with all its faults."""
    named = hf.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "none"
    family = FAMILIES.get(architecture)
    if family is None:
        of_text = FAMILIES.get(architecture.replace(IMAGE_MODEL, LANGUAGE_MODEL))
        cure = IMAGE_CURE if of_text and of_text.has_delta_net else ""
        raise UserError(
            [f"{source}: architecture `{architecture}` is not supported; supported are {', '.join(FAMILIES)}{cure}"]
        )
    hf = {**family.defaults, **hf}
    wrong_types = _wrong_types(hf, source, family)
    moe, moe_problems = (
        read_experts(hf, source, family.has_shared_experts) if family.is_moe and not wrong_types else (None, [])
    )
    wrong = [
        f"{source}: `{key}: {hf[key]}` is not supported for {architecture}{_cure(key, hf[key])}"
        for key, is_neutral in family.neutral.items()
        if key in hf and not is_neutral(hf[key])
    ]
    has_local_rope = family.windows == "rotated apart"
    windows, window_problems = (
        read_windows(hf, source, has_local_rope) if family.windows and not wrong_types else (None, [])
    )
    latent, latent_problems = read_latent(hf, source) if family.is_latent and not wrong_types else (None, [])
    delta, delta_problems = read_delta_net(hf, source) if family.has_delta_net and not wrong_types else (None, [])
    rope, rope_problems = read_rope(
        of_global_layers(hf) if has_local_rope else hf, source, family.partial_rotary, family.is_latent
    )
    required = (*REQUIRED, family.ffn_key, *family.required)
    missing = [f"{source}: `{key}` is missing" for key in required if hf.get(key) is None]
    if family.needs_rope and not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        missing.append(f"{source}: `rope_parameters` is missing")
    missing += moe_problems + window_problems + latent_problems + delta_problems
    if wrong_types or wrong or rope_problems or missing:
        raise UserError(wrong_types + wrong + rope_problems + missing)
    heads = hf["num_attention_heads"]
    # a latent attention has the rotated dimensions under this name in config.json, or none
    head_dim = latent.key_dim if latent else hf.get("head_dim") or hf["hidden_size"] // heads
    return ModelSpec(
        family=architecture,
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_size=hf[family.ffn_key],
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rotary_dim=latent.rotary_dim if latent else int(head_dim * rope.share),
        vocab_size=hf["vocab_size"],
        max_positions=hf["max_position_embeddings"],
        norm_eps=hf["rms_norm_eps"],
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tied_embeddings=bool(hf.get("tie_word_embeddings")),
        qkv_bias=bool(hf["attention_bias"]) if family.qkv_bias is None else family.qkv_bias,
        qk_norm=bool(hf["use_qk_norm"]) if family.qk_norm is None else family.qk_norm,
        latent=latent,
        windows=windows,
        delta_net=delta,
        attention_every=hf[ATTENTION_EVERY] if delta else 1,
        moe=moe,
        num_prediction_layers=hf.get("num_nextn_predict_layers") or 0 if family.has_shared_experts else 0,
        **family.spec_fields(hf),
    )


_CURES = {
    "quantization_config": "; convert the weights to bfloat16 first, and leave the field out",
    "model_type: kimi_k2": "; set it to deepseek_v3, which has the same layers",
}
REQUIRED = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
_SIZES = (*REQUIRED[:-1], "num_key_value_heads", "head_dim")
_MOE_SIZES = ("num_experts", "num_local_experts", "num_experts_per_tok")
_WINDOW_SIZES = ("sliding_window", "sliding_window_pattern", "query_pre_attn_scalar")
_WHOLE = ("first_k_dense_replace", "num_nextn_predict_layers")
_NUMBERS = ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "swiglu_limit")
_SWITCHES = ("tie_word_embeddings", "norm_topk_prob", "attention_bias", "use_qk_norm", "rope_interleave")


def _cure(key: str, value: object) -> str:
    return _CURES.get(key) or _CURES.get(f"{key}: {value}", "")


def _wrong_types(hf: dict, source: str, family: Family) -> list[str]:
    """Return a sentence per key with a value of a wrong type. null is as good as absent."""
    sizes = (*_SIZES, family.ffn_key, *(_MOE_SIZES if family.is_moe else ()))
    sizes += SHARED_MOE_SIZES if family.has_shared_experts else ()
    sizes += LATENT_SIZES if family.is_latent else ()
    sizes += (*DELTA_SIZES, ATTENTION_EVERY) if family.has_delta_net else ()
    sizes += _WINDOW_SIZES if family.windows else ()
    kinds: dict[str, tuple[str, Callable[[object], bool]]] = dict.fromkeys(sizes, ("a whole number above 0", _is_size))
    whole = ("a whole number, 0 or above", lambda value: value == 0 or _is_size(value))
    kinds |= dict.fromkeys(_WHOLE if family.has_shared_experts else (SHARED_EXPERT,) if family.is_moe else (), whole)
    kinds["num_hidden_layers"] = ("a whole number from 1 to 10000", lambda value: _is_size(value, 10_000))
    kinds |= dict.fromkeys(_NUMBERS, ("a number above 0", _is_positive))
    kinds |= dict.fromkeys(_SWITCHES, ("true or false", lambda value: isinstance(value, bool)))
    return [
        f"{source}: `{key}: {json.dumps(hf[key])}` is not {what}"
        for key, (what, is_one) in kinds.items()
        if hf.get(key) is not None and not is_one(hf[key])
    ]


def _is_size(value: object, most: int = 2**31 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300
