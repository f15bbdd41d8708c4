"""Checks of the config against the model's config.json: divisible sizes, enough positions."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import (
    critic_path,
    has_given_servers,
    longest_sample,
    uses_critic,
)
from megatron_dapo.config.key_names import MEGATRON, ROLLOUT, ROUTER_REPLAY, TARGET_MODULES
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.model_shapes import MODEL_SHAPES
from megatron_dapo.estimates.pipeline import PipelineSplit, pipeline_split
from megatron_dapo.huggingface.experts import SHARED_EXPERT, num_experts_of
from megatron_dapo.huggingface.family import Family
from megatron_dapo.huggingface.lora_settings import ALL_LINEAR, LINEAR_MODULES, target_modules
from megatron_dapo.huggingface.model_families import FAMILIES
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import linear_modules
from megatron_dapo.huggingface.spec_reader import critic_spec, model_spec
from megatron_dapo.storage.model_folder import ModelFolder


def read_model_json(config: Config) -> dict[str, Any] | None:
    """Return `shape_of` the actor; None if it is unreadable (`validate` says why)."""
    return shape_of(config.actor_rollout_ref.model.path)


def shape_of(path: str) -> dict[str, Any] | None:
    """Return config.json of a checkpoint. For a checkpoint elsewhere: the shape of the published
    model with its folder's name, so that a cluster's recipe is planned on a laptop."""
    if name := published_name(path):
        return MODEL_SHAPES[name]
    return model_json_of(path)


def published_name(path: str) -> str | None:
    """Return the published model with the folder name of an absent checkpoint; None for a
    checkpoint on this machine, or another name."""
    name = Path(path).name.lower()
    return name if name in MODEL_SHAPES and not ModelFolder.of(path).config_json.exists() else None


def model_json_of(path: str) -> dict[str, Any] | None:
    """Return config.json of a checkpoint of either kind; None if it is unreadable."""
    try:
        return ModelFolder.of(path).read_config()
    except UserError:
        return None


def read_model_specs(config: Config) -> tuple[ModelSpec, ModelSpec | None] | None:
    """Return the ModelSpec of the actor and of the critic, if any; None if one is unreadable or
    unsupported (`validate` says why)."""
    actor = _model_spec_of(config.actor_rollout_ref.model.path, model_spec)
    critic = _model_spec_of(critic_path(config), critic_spec) if uses_critic(config) else None
    if actor is None or (critic is None and uses_critic(config)):
        return None
    return actor, critic


def _model_spec_of(path: str, spec_of: Callable[[dict[str, Any]], ModelSpec]) -> ModelSpec | None:
    content = shape_of(path)
    try:
        return None if content is None else spec_of(content)
    except (UserError, ValueError):
        return None


def divisible_by_tp(config: Config, model: dict[str, Any]) -> Iterator[str]:
    tp = config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size
    heads = _size(model, "num_attention_heads")
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": _size(model, "num_key_value_heads") or heads,
        "hidden_size": _size(model, "hidden_size"),
        "intermediate_size": _size(model, "intermediate_size") if _has_dense_layers(model) else None,
        # the other experts are cut over ETP
        "n_shared_experts x moe_intermediate_size": _shared_size(model),
        SHARED_EXPERT: _size(model, SHARED_EXPERT) if num_experts_of(model) else None,
    }
    for name, size in sizes.items():
        if size and size % tp:
            yield (
                f"{MEGATRON}.tensor_model_parallel_size is {tp}, but does not divide the model's {name} {size}; "
                f"choose a divisor of {size}."
            )


def _has_dense_layers(model: dict[str, Any]) -> bool:
    """Return whether layers have an MLP: all of them, or those before the first with experts."""
    return not num_experts_of(model) or ("n_routed_experts" in model and model.get("first_k_dense_replace") != 0)


def _shared_size(model: dict[str, Any]) -> int | None:
    """Return the width of the shared experts; None without shared experts."""
    if "n_routed_experts" not in model:
        return None
    return (_size(model, "n_shared_experts") or 1) * (_size(model, "moe_intermediate_size") or 0)


def pipeline(config: Config, model: dict[str, Any]) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    layers = _size(model, "num_hidden_layers")
    if not layers:
        return
    pp = megatron.pipeline_model_parallel_size
    vpp = megatron.virtual_pipeline_model_parallel_size
    split = pipeline_split(layers, pp, vpp or 1, megatron.pipeline_layers)
    if megatron.pipeline_layers is not None and sum(split.layers) != layers:
        yield (
            f"{MEGATRON}.pipeline_layers is {megatron.pipeline_layers}, {sum(split.layers)} layers together, but the "
            f"model's num_hidden_layers is {layers}; correct it, or set null."
        )
    elif megatron.pipeline_layers is None and split.has_idle_chunk:
        yield (
            f"{MEGATRON}.pipeline_model_parallel_size {pp}"
            f"{f' x virtual_pipeline_model_parallel_size {vpp}' if vpp else ''} is {len(split.layers)} chunks, more "
            f"than the model's num_hidden_layers {layers}, its embedding and its head can fill; lower it."
        )
    else:
        yield from _recompute(config, split)


def experts(config: Config, model: dict[str, Any]) -> Iterator[str]:
    yield from known_mistakes(_MIXTURE_CHECKS if num_experts_of(model) else _DENSE_CHECKS, config, model)


def _no_expert_parallelism(config: Config, model: dict[str, Any]) -> Iterator[str]:
    size = config.actor_rollout_ref.actor.megatron.expert_model_parallel_size
    if size > 1:
        yield (
            f"{MEGATRON}.expert_model_parallel_size is {size}, but the model has no experts ({_architecture(model)}); "
            f"set it to 1."
        )


def _no_cut_experts(config: Config, model: dict[str, Any]) -> Iterator[str]:
    size = config.actor_rollout_ref.actor.megatron.expert_tensor_parallel_size
    if size > 1:
        yield (
            f"{MEGATRON}.expert_tensor_parallel_size is {size}, but the model has no experts ({_architecture(model)}); "
            f"set it to 1."
        )


def _no_router_replay(config: Config, model: dict[str, Any]) -> Iterator[str]:
    mode = config.actor_rollout_ref.actor.router_replay
    if mode != "off":
        yield f"{ROUTER_REPLAY} is {mode}, but the model has no experts ({_architecture(model)}); set it to off."


def _expert_parallelism(config: Config, model: dict[str, Any]) -> Iterator[str]:
    ep = config.actor_rollout_ref.actor.megatron.expert_model_parallel_size
    num_experts = num_experts_of(model)
    if isinstance(num_experts, int) and num_experts % ep:
        yield (
            f"{MEGATRON}.expert_model_parallel_size is {ep}, but does not divide the model's num_experts "
            f"{num_experts}; choose a divisor of {num_experts}."
        )


def _cut_experts(config: Config, model: dict[str, Any]) -> Iterator[str]:
    etp = config.actor_rollout_ref.actor.megatron.expert_tensor_parallel_size
    width_key = _expert_width_key(model)
    width = _size(model, width_key)
    if etp > 1 and _has_biased_experts(model):
        yield (
            f"{MEGATRON}.expert_tensor_parallel_size is {etp}, but Megatron-core cuts no experts with biases "
            f"({_architecture(model)}); set it to 1."
        )
    elif width and width % etp:
        yield (
            f"{MEGATRON}.expert_tensor_parallel_size is {etp}, but does not divide the model's {width_key} {width}; "
            f"choose a divisor of {width}."
        )


def _sequence_parallelism(config: Config, model: dict[str, Any]) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    tp = megatron.tensor_model_parallel_size
    if tp > 1 and not megatron.sequence_parallel:
        yield (
            f"{MEGATRON}.sequence_parallel is false with tensor_model_parallel_size {tp}, but a model with experts "
            f"({_architecture(model)}) needs it there; set it to true."
        )


def _no_user_buffers(config: Config, model: dict[str, Any]) -> Iterator[str]:
    if config.actor_rollout_ref.actor.megatron.tp_comm_overlap:
        yield (
            f"{MEGATRON}.tp_comm_overlap is true, which a model with experts ({_architecture(model)}) has not yet; "
            f"set it to false."
        )


def _no_fp8(config: Config, model: dict[str, Any]) -> Iterator[str]:
    form = config.actor_rollout_ref.actor.megatron.fp8
    if form != "none":
        yield (
            f"{MEGATRON}.fp8 is {form}, which a model with experts ({_architecture(model)}) has not yet; set fp8 to "
            f"none."
        )


def _delta_nets(config: Config, model: dict[str, Any]) -> Iterator[str]:
    family, heads = _family_of(model), _size(model, "linear_num_key_heads")
    if family is None or not family.has_delta_net or not heads:
        return
    megatron = config.actor_rollout_ref.actor.megatron
    ranks = megatron.tensor_model_parallel_size * megatron.context_parallel_size
    if heads % ranks:
        yield (
            f"{MEGATRON}.tensor_model_parallel_size x context_parallel_size is {ranks}, but does not divide the "
            f"model's linear_num_key_heads {heads}; choose a divisor of {heads}."
        )
    settings: dict[str, tuple[object, object]] = {
        "fp8": (megatron.fp8, "none"), "tp_comm_overlap": (megatron.tp_comm_overlap, False),
    }  # fmt: skip
    if not config.actor_rollout_ref.model.lora_rank:
        # Megatron's optimizer for it takes no slice of a trained float32 tensor, as the decays are
        settings["optimizer_offload_fraction"] = (megatron.optimizer_offload_fraction, 0.0)
    for key, (value, off) in settings.items():
        if value != off:
            yield (
                f"{MEGATRON}.{key} is {str(value).lower()}, which a model with gated delta nets "
                f"({_architecture(model)}) has not yet; set it to {str(off).lower()}."
            )


_DENSE_CHECKS = (_no_expert_parallelism, _no_cut_experts, _no_router_replay)
_MIXTURE_CHECKS = (_expert_parallelism, _cut_experts, _sequence_parallelism, _no_user_buffers, _no_fp8)


def _architecture(model: dict[str, Any]) -> str:
    return str((model.get("architectures") or ["unknown"])[0])


def _family_of(model: dict[str, Any]) -> Family | None:
    return FAMILIES.get(_architecture(model))


def _expert_width_key(model: dict[str, Any]) -> str:
    """Return the name of an expert's width in a mixture's config.json."""
    family = _family_of(model)
    return family.ffn_key if family else "moe_intermediate_size"


def has_stacked_experts(model: dict[str, Any]) -> bool:
    """Return whether a tensor of this model has all experts of a layer."""
    family = _family_of(model)
    return family is not None and family.has_stacked_experts


def _has_biased_experts(model: dict[str, Any]) -> bool:
    family = _family_of(model)
    return family is not None and family.has_biased_experts


def adapted_modules(config: Config, model: dict[str, Any]) -> list[str]:
    """Return the last names of a model's modules with an adapter; [] for an unreadable model."""
    return [name for name in _linear_modules(model) if name in target_modules(config)]


def _linear_modules(model: dict[str, Any]) -> tuple[str, ...]:
    try:
        return linear_modules(model_spec(model))
    except (UserError, ValueError):  # another check reports it
        return ()


def _adapters(config: Config, model: dict[str, Any]) -> Iterator[str]:
    modules = _linear_modules(model)
    targets = config.actor_rollout_ref.model.target_modules
    rank = config.actor_rollout_ref.model.lora_rank
    if not modules or not rank:
        return
    if targets == ALL_LINEAR:
        return
    missing = [n for n in target_modules(config) if n in LINEAR_MODULES and n not in modules]
    if missing:
        yield (
            f"{TARGET_MODULES} has {', '.join(missing)}, of which a {_architecture(model)} has none; choose from "
            f"{', '.join(modules)}, or {ALL_LINEAR} for all of them."
        )


def fp8(config: Config, model: dict[str, Any]) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    tp = megatron.tensor_model_parallel_size
    heads = _size(model, "num_attention_heads")
    hidden = _size(model, "hidden_size")
    if megatron.fp8 == "none" or not heads or not hidden or num_experts_of(model):
        return
    multiple = 32 if megatron.fp8_recipe == "mxfp8" else 16
    dim = _size(model, "head_dim") or hidden // heads
    sizes = {
        "hidden_size": hidden,
        "intermediate_size / TP": (_size(model, "intermediate_size") or 0) // tp,
        "query heads x head_dim / TP": heads * dim // tp,
        "key-value heads x head_dim / TP": (_size(model, "num_key_value_heads") or heads) * dim // tp,
    }
    for name, size in sizes.items():
        if size % multiple:
            yield (
                f"{MEGATRON}.fp8 is {megatron.fp8}, whose products need multiples of {multiple}, but the model's "
                f"{name} is {size} at TP {tp}; lower tensor_model_parallel_size, or set fp8 to none."
            )


def _recompute(config: Config, split: PipelineSplit) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.recompute_granularity != "full":
        return
    number = megatron.recompute_num_layers
    if megatron.recompute_method == "uniform":
        is_wrong = any(layers % number for layers in split.layers)
        demand = f"divide the layers of every pipeline chunk ({split})"
    else:
        is_wrong = number > split.largest
        demand = f"be at most {split.largest}, the layers of the largest pipeline chunk"
    if is_wrong:
        yield (
            f"{MEGATRON}.recompute_num_layers is {number}, but with recompute_method {megatron.recompute_method} it "
            f"must {demand}; lower it."
        )


def positions(config: Config, model: dict[str, Any]) -> Iterator[str]:
    limit = _size(model, "max_position_embeddings")
    longest = longest_sample(config)
    if not limit or longest <= limit:
        return
    if config.sft.enable:
        yield f"sft.max_length is {longest}, above the model's max_position_embeddings {limit}; lower it."
    else:
        data = config.data
        yield (
            f"data.max_prompt_length {data.max_prompt_length} + data.max_response_length {data.max_response_length} is "
            f"{longest}, above the model's max_position_embeddings {limit}; shorten one."
        )


def servers(config: Config, model: dict[str, Any]) -> Iterator[str]:
    if has_given_servers(config):
        return
    tp = config.actor_rollout_ref.rollout.server.tensor_model_parallel_size
    key = f"{ROLLOUT}.server.tensor_model_parallel_size"
    widths = [_expert_width_key(model), SHARED_EXPERT] if num_experts_of(model) else []
    names = ("num_attention_heads", "linear_num_key_heads", *widths)
    sizes = {name: size for name in names if (size := _size(model, name)) is not None and size % tp}
    for name, size in sizes.items():
        yield f"{key} is {tp}, but does not divide the model's {name} {size}; choose a divisor of {size}."
    kv_heads = _size(model, "num_key_value_heads")
    # more ranks than heads repeat the heads, all of them equally often
    if kv_heads and not sizes and kv_heads % tp and tp % kv_heads:
        yield (
            f"{key} is {tp}, but is neither a divisor nor a multiple of the model's num_key_value_heads "
            f"{kv_heads}; choose one."
        )


def _kept_states(config: Config, model: dict[str, Any]) -> Iterator[str]:
    family = _family_of(model)
    if config.weight_sync.pause_mode == "in_place" and family is not None and family.has_delta_net:
        yield (
            f"weight_sync.pause_mode is in_place, but a response's state in a {_architecture(model)} would keep what "
            f"old weights made of all of its tokens; set it to retract."
        )


def _vocabulary(config: Config, model: dict[str, Any]) -> Iterator[str]:
    size = _size(model, "vocab_size")
    rollout = config.actor_rollout_ref.rollout
    wrong = [token for token in rollout.stop_token_ids if size and not 0 <= token < size]
    if wrong:
        yield f"{ROLLOUT}.stop_token_ids holds {wrong}, outside the model's vocabulary of {size} tokens; correct them."


def _size(model: dict[str, Any], name: str) -> int | None:
    """Return a positive whole number of config.json; None if it is absent or of another type."""
    value = model.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


MODEL_CHECKS = (
    divisible_by_tp,
    pipeline,
    experts,
    _delta_nets,
    _adapters,
    fp8,
    positions,
    servers,
    _kept_states,
    _vocabulary,
)
