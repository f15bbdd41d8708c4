"""Reads a Hugging Face config.json into the few facts the model is built from; says by name what is not supported."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.sizes import round_up
from megatron_dapo.huggingface.experts import SHARED_MOE_SIZES, MoEConfig, read_experts
from megatron_dapo.huggingface.latent import LATENT_SIZES, LatentAttention, read_latent
from megatron_dapo.huggingface.rope import RopeScaling, read_rope
from megatron_dapo.huggingface.windows import Windows, of_global_layers, read_windows
from megatron_dapo.storage.model_folder import ModelFolder

Activation = Literal["silu", "gelu_tanh", "quick_gelu"]


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: everything that is needed to build it, independent of the parallel layout."""

    family: str  # key of FAMILIES
    num_layers: int
    hidden_size: int
    ffn_size: int  # of the MLP; in a MoE model, of one expert
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    rotary_dim: int  # the first of a head's dimensions, which are rotated
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rotary_interleaved: bool = False  # a rotated pair is two neighbours, in place of one of each half
    output_norms: bool = False  # an RMSNorm of what attention and MLP add to the hidden states
    zero_centered_norms: bool = False  # norms multiply by 1 + weight, and round to the model's type thereafter
    product_rounded_norms: bool = False  # norms round to the model's type once, when they have multiplied by the weight
    embedding_scale: float = 1.0  # what embeddings are multiplied by, rounded to the model's type
    attention_dim: int | None = None  # products of query and key are divided by its root; none = head_dim
    activation: Activation = "silu"  # of the gate
    glu_limit: float | None = None  # gate and up are clamped to it, and 1 is added to up (gpt-oss); none = as they are
    linear_biases: bool = False  # of all products of a layer besides query, key and value, the router's too
    attention_sinks: bool = False  # a number per head in the softmax of its scores, which has no value
    latent: LatentAttention | None = None  # none = queries, keys and values are products of the hidden states
    windows: Windows | None = None  # none = all layers see all tokens before them
    moe: MoEConfig | None = None  # none = dense
    num_prediction_layers: int = 0  # of multi-token prediction, which checkpoints may have behind the last layer
    value_head: bool = False  # a critic: one number per position in the place of the log-probs

    def as_critic(self) -> "ModelSpec":
        """Return the same body with a value head."""
        return replace(self, tied_embeddings=False, value_head=True)

    @property
    def value_dim(self) -> int:
        """Return the dimensions of a head of values, which is what a head of the attention answers."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def dense_ffn_size(self) -> int:
        """Return the width of the MLP of a layer without experts."""
        return self.moe.dense_ffn_size if self.moe else self.ffn_size

    @property
    def active_ffn_size(self) -> int:
        """Return the width of the MLPs that a token passes through in a layer; in a MoE model, in one with experts."""
        if self.moe is None:
            return self.ffn_size
        return self.ffn_size * self.moe.experts_per_token + self.moe.shared_ffn_size

    @property
    def num_moe_layers(self) -> int:
        """Return how many layers have experts."""
        return self.num_layers - self.moe.num_dense_layers if self.moe else 0

    @property
    def mean_active_ffn_size(self) -> float:
        """Return the width of the MLPs that a token passes through in a layer, the mean over all of them."""
        num_dense = self.num_layers - self.num_moe_layers
        dense = num_dense * self.dense_ffn_size if num_dense else 0
        return (dense + self.num_moe_layers * self.active_ffn_size) / self.num_layers

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts."""
        return self.moe is not None and layer >= self.moe.num_dense_layers

    def padded_vocab_size(self, tp: int) -> int:
        """Return the rows of the embedding: the vocabulary, rounded up to equal shares of tensor-parallel ranks."""
        return round_up(self.vocab_size, tp)

    @property
    def num_local_layers(self) -> int:
        """Return how many layers see a window alone."""
        return sum(self.windows.is_local) if self.windows else 0

    def of_local_layers(self) -> "ModelSpec | None":
        """Return the same model with the rotary settings of its local layers; none where all layers have the same."""
        if self.windows is None or self.windows.rope_theta is None:
            return None
        return replace(self, rope_theta=self.windows.rope_theta, rope_scaling=None)


# Fields of config.json that change the computation, each with the values under which it does not (see `Family`).
NeutralValues = Mapping[str, Callable[[object], bool]]

# The fields of every family. What training by log-probs does not use (router_aux_loss_coef, output_router_logits) is
# not looked at.
DECODER: NeutralValues = {
    "hidden_act": lambda value: value == "silu",
    "attention_bias": lambda value: not value,
    "mlp_bias": lambda value: not value,
    "use_sliding_window": lambda value: not value,
    "attention_dropout": lambda value: not value,
    "pretraining_tp": lambda value: value in (None, 1),
    "quantization_config": lambda value: value is None,
    "logits_soft_cap": lambda value: value is None,
    "layer_types": lambda value: (
        value is None or (isinstance(value, list) and {*map(str, value)} == {"full_attention"})
    ),
    "shared_expert_intermediate_size": lambda value: not value,
    "n_shared_experts": lambda value: not value,
}
DENSE: NeutralValues = {  # no layer has experts
    **DECODER,
    "num_experts": lambda value: not value,
    "num_local_experts": lambda value: not value,
    "n_routed_experts": lambda value: not value,
}
MIXTURE: NeutralValues = {  # every layer has experts
    **DECODER,
    "decoder_sparse_step": lambda value: value == 1,
    "mlp_only_layers": lambda value: not value,
}
SHARED_MIXTURE: NeutralValues = {  # experts behind dense first layers, beside a shared one
    key: is_neutral for key, is_neutral in DECODER.items() if key not in ("attention_bias", "n_shared_experts")
}
# The norms of latent vectors have this epsilon in transformers, and rms_norm_eps in SGLang. transformers has only the
# kind of router that the next three fields name; SGLang reads them, so that they must be there. With router_fp32 SGLang
# holds the weight of a router in float32.
DEEPSEEK: NeutralValues = {
    **SHARED_MIXTURE,
    "attention_bias": lambda value: not value,
    "rms_norm_eps": lambda value: value == 1e-6,
    "topk_method": lambda value: value == "noaux_tc",
    "scoring_func": lambda value: value == "sigmoid",
    "moe_layer_freq": lambda value: value == 1,
    "router_fp32": lambda value: not value,
}


# SGLang answers with the embedding as head, whatever tie_word_embeddings says, and without final_logit_softcapping.
GEMMA3: NeutralValues = {
    **{name: rule for name, rule in DENSE.items() if name not in ("hidden_act", "layer_types")},
    "hidden_activation": lambda value: value == "gelu_pytorch_tanh",
    "tie_word_embeddings": lambda value: value is True,
    "attn_logit_softcapping": lambda value: value is None,
    "final_logit_softcapping": lambda value: value is None,
    "use_bidirectional_attention": lambda value: not value,
}

# The factor in the sigmoid has one name in transformers and another in SGLang, which also has a head of its own always.
# Without layer_types transformers has a window in every other layer, whatever sliding_window_pattern says.
# In SGLang the weights of a token's experts are divided by their sum, as in transformers, whatever config.json says.
GPT_OSS: NeutralValues = {
    **{name: rule for name, rule in MIXTURE.items() if name != "layer_types"},
    "attention_bias": lambda value: value is True,
    "swiglu_alpha": lambda value: value == 1.702,
    "hidden_act_alpha": lambda value: value == 1.702,
    "norm_topk_prob": lambda value: value is True,
    "sliding_window_pattern": lambda value: value == 2,
    "tie_word_embeddings": lambda value: not value,
}


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the plain decoder (RMSNorm, gated SiLU, rotary embeddings, no biases).

    qkv_bias: biases of query, key and value; none = as attention_bias of config.json says. qk_norm: an RMSNorm per
    query and key head, before the rotation; none = as use_qk_norm says. is_moe: experts in place of MLPs, as in
    Qwen3-MoE. has_shared_experts: the mixture is as in GLM-4.5 and DeepSeek-V3: dense first layers, shared experts, a
    sigmoid router with a bias. partial_rotary: config.json says which share of a head's dimensions is rotated.
    rotary_interleaved, output_norms: see `ModelSpec`. fused_gate_up: gate and up projection of an MLP are one module.
    neutral: the fields of its config.json that change the computation, each with the values under which it does not;
    any other value is refused. A family whose fields differ has a table of its own, made from DENSE or MIXTURE, so that
    what one family ignores or takes is not ignored or taken for others. defaults: what transformers takes for a field
    that is absent, where it is not what other families take. is_gemma: what the fields of `ModelSpec` from
    zero_centered_norms on say, as Gemma 3 has it. is_latent: the attention is latent (`LatentAttention`). is_gpt_oss:
    sinks, windows, biases, norms and the experts' activation are those of gpt-oss. stacked_experts: a tensor of a
    checkpoint is a stack of those of all experts of a layer.
    """

    qkv_bias: bool | None
    qk_norm: bool | None
    neutral: NeutralValues
    is_moe: bool = False
    has_shared_experts: bool = False
    partial_rotary: bool = False
    rotary_interleaved: bool = False
    output_norms: bool = False
    is_gemma: bool = False
    is_latent: bool = False
    is_gpt_oss: bool = False
    stacked_experts: bool = False
    fused_gate_up: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)

    @property
    def ffn_key(self) -> str:
        return "moe_intermediate_size" if self.is_moe and not self.is_gpt_oss else "intermediate_size"

    @property
    def has_windows(self) -> bool:
        return self.is_gemma or self.is_gpt_oss


FAMILIES = {
    "Qwen2ForCausalLM": Family(qkv_bias=True, qk_norm=False, neutral=DENSE),
    "Qwen3ForCausalLM": Family(qkv_bias=False, qk_norm=True, neutral=DENSE),
    "LlamaForCausalLM": Family(qkv_bias=False, qk_norm=False, neutral=DENSE),
    "MistralForCausalLM": Family(
        qkv_bias=False,
        qk_norm=False,
        neutral={**DENSE, "sliding_window": lambda value: value is None},
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "Glm4ForCausalLM": Family(
        qkv_bias=None,
        qk_norm=False,
        partial_rotary=True,
        fused_gate_up=True,
        rotary_interleaved=True,
        output_norms=True,
        neutral={name: rule for name, rule in DENSE.items() if name != "attention_bias"},
        defaults={
            "attention_bias": True,
            "head_dim": 128,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
        },
    ),
    "Gemma3ForCausalLM": Family(
        qkv_bias=False,
        qk_norm=True,
        output_norms=True,
        is_gemma=True,
        neutral=GEMMA3,
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3MoeForCausalLM": Family(qkv_bias=False, qk_norm=True, neutral=MIXTURE, is_moe=True),
    "Glm4MoeForCausalLM": Family(
        qkv_bias=None,
        qk_norm=None,
        partial_rotary=True,
        neutral=SHARED_MIXTURE,
        is_moe=True,
        has_shared_experts=True,
        defaults={
            "attention_bias": False,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
    ),
    "DeepseekV3ForCausalLM": Family(
        qkv_bias=False,
        qk_norm=False,
        neutral=DEEPSEEK,
        is_moe=True,
        has_shared_experts=True,
        is_latent=True,
        defaults={
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 1536,
            "rope_interleave": True,
            "topk_method": None,
            "scoring_func": None,
            "moe_layer_freq": None,
        },
    ),
    "GptOssForCausalLM": Family(
        qkv_bias=True,
        qk_norm=False,
        neutral=GPT_OSS,
        is_moe=True,
        is_gpt_oss=True,
        stacked_experts=True,
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "norm_topk_prob": True,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "swiglu_limit": 7.0,
        },
    ),
}


LANGUAGE_MODEL, CLASSIFIERS = "ForCausalLM", ("ForTokenClassification", "ForSequenceClassification")
"""How Hugging Face's names of architectures end: of a family's language model, and of its body with another head."""


def read_critic_spec(path: str | Path) -> ModelSpec:
    """Return the ModelSpec of what a critic starts from: a language model of ours, or a classifier of its family.
    Raises as `read_model_spec`."""
    return critic_spec(*_read_config(path, "critic.model.path"))


def critic_spec(hf: dict, source: str = "config.json") -> ModelSpec:
    """Return the ModelSpec of a critic from the parsed config.json of what it starts from. Raises as `model_spec`."""
    names = hf.get("architectures")
    if isinstance(names, list) and names:
        name = str(names[0])
        for ending in CLASSIFIERS:
            name = name.replace(ending, LANGUAGE_MODEL)
        hf = hf | {"architectures": [name]}
    # a critic has a head of its own, whatever the language model has
    hf = {key: value for key, value in hf.items() if key != "tie_word_embeddings"}
    return model_spec(hf, source).as_critic()


def read_model_spec(path: str | Path) -> ModelSpec:
    """Return the ModelSpec of a checkpoint folder. Raises UserError with every unsupported architecture or field."""
    return model_spec(*_read_config(path))


def read_vocab_size(path: str | Path) -> int:
    """Return how many tokens the model of a checkpoint folder knows. Raises UserError."""
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
    """Return the ModelSpec of a parsed config.json. Raises UserError with all that is wrong or not supported there."""
    named = hf.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "none"
    family = FAMILIES.get(architecture)
    if family is None:
        raise UserError(
            [f"{source}: architecture `{architecture}` is not supported; supported are {', '.join(FAMILIES)}"]
        )
    hf = {**family.defaults, **hf}
    wrong_types = _wrong_types(hf, source, family)
    moe, moe_problems = (
        read_experts(hf, source, family.has_shared_experts) if family.is_moe and not wrong_types else (None, [])
    )
    wrong = [
        f"{source}: `{key}: {hf[key]}` is not supported for {architecture}{_CURES.get(key, '')}"
        for key, is_neutral in family.neutral.items()
        if key in hf and not is_neutral(hf[key])
    ]
    windows, window_problems = (
        read_windows(hf, source, has_local_rope=family.is_gemma)
        if family.has_windows and not wrong_types
        else (None, [])
    )
    latent, latent_problems = read_latent(hf, source) if family.is_latent and not wrong_types else (None, [])
    rope, rope_problems = read_rope(
        of_global_layers(hf) if family.is_gemma else hf, source, family.partial_rotary, family.is_latent
    )
    required = (*REQUIRED, family.ffn_key, *(("swiglu_limit",) if family.is_gpt_oss else ()))
    missing = [f"{source}: `{key}` is missing" for key in required if hf.get(key) is None]
    if family.is_gpt_oss and not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        missing.append(f"{source}: `rope_parameters` is missing")  # libraries would scale, or not
    missing += moe_problems + window_problems + latent_problems
    if wrong_types or wrong or rope_problems or missing:
        raise UserError(wrong_types + wrong + rope_problems + missing)
    heads = hf["num_attention_heads"]
    # config.json of a latent attention has the rotated dimensions under this name, or none
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
        rotary_interleaved=bool(hf["rope_interleave"]) if latent else family.rotary_interleaved,
        output_norms=family.output_norms,
        zero_centered_norms=family.is_gemma,
        product_rounded_norms=family.is_gpt_oss,
        embedding_scale=hf["hidden_size"] ** 0.5 if family.is_gemma else 1.0,
        attention_dim=hf["query_pre_attn_scalar"] if family.is_gemma else None,
        activation="gelu_tanh" if family.is_gemma else "quick_gelu" if family.is_gpt_oss else "silu",
        glu_limit=float(hf["swiglu_limit"]) if family.is_gpt_oss else None,
        linear_biases=family.is_gpt_oss,
        attention_sinks=family.is_gpt_oss,
        latent=latent,
        windows=windows,
        moe=moe,
        num_prediction_layers=hf.get("num_nextn_predict_layers") or 0 if family.has_shared_experts else 0,
    )


_CURES = {"quantization_config": "; convert the weights to bfloat16 first, and leave the field out"}
REQUIRED = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
_SIZES = (*REQUIRED[:-1], "num_key_value_heads", "head_dim")
_MOE_SIZES = ("num_experts", "num_local_experts", "num_experts_per_tok")
_WINDOW_SIZES = ("sliding_window", "sliding_window_pattern", "query_pre_attn_scalar")
_NUMBERS = ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "swiglu_limit")
_SWITCHES = ("tie_word_embeddings", "norm_topk_prob", "attention_bias", "use_qk_norm", "rope_interleave")


def _wrong_types(hf: dict, source: str, family: Family) -> list[str]:
    """Return a sentence per key whose value is of a wrong type. null is as good as absent."""
    sizes = (*_SIZES, family.ffn_key, *(_MOE_SIZES if family.is_moe else ()))
    sizes += SHARED_MOE_SIZES if family.has_shared_experts else ()
    sizes += LATENT_SIZES if family.is_latent else ()
    sizes += _WINDOW_SIZES if family.has_windows else ()
    kinds: dict[str, tuple[str, Callable[[object], bool]]] = dict.fromkeys(sizes, ("a whole number above 0", _is_size))
    if family.has_shared_experts:
        whole = ("a whole number, 0 or above", lambda value: value == 0 or _is_size(value))
        kinds |= dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), whole)
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
