"""`auto` of recomputation and offload: the least of both for the trainer to fit into its GPUs.

Of recomputation the estimate chooses among nothing, the MLP of every layer, the first layers of
each stage, and all layers. core_attn is left out: it frees little memory; the first layers, one by
one, free more for each second.
"""

import bisect
from collections.abc import Mapping
from typing import Any

from megatron_dapo.config.derived import parallel_sizes
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.memory import trainer_memory, usable_memory
from megatron_dapo.estimates.pipeline import split_of
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import attention_weights

NOTHING = {"recompute_granularity": "none"}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
OFFLOADED_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
ALL_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def settled(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> Config:
    """Return the config with every `auto` settled; what takes least memory if nothing fits (see
    `shortage.shortage`). critic: the spec of a critic of another size than the actor.

    Recomputation comes before offload: the host steps Adam in the time of many forward passes.
    """
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.optimizer_offload_fraction == "auto":
        for share in OFFLOADED_SHARES:
            changed = settled(_with(config, {"optimizer_offload_fraction": share}), actor, critic)
            if _fits(changed, actor, critic):
                break
        return changed
    if megatron.recompute_granularity != "auto":
        return config
    return _with(config, least_that_fits(config, actor, critic) or ALL_LAYERS)


def _fits(config: Config, actor: ModelSpec, critic: ModelSpec | None) -> bool:
    return trainer_memory(config, actor, critic).total <= usable_memory(config, actor)


def least_that_fits(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> dict[str, Any] | None:
    """Return the keys, by their last names, of the least recomputation with enough memory, or
    None."""

    def fits(keys: Mapping[str, Any]) -> bool:
        return _fits(_with(config, keys), actor, critic)

    sizes = parallel_sizes(config)
    num_layers = split_of(actor, sizes).largest
    if critic is not None:  # its layers are recomputed by the same keys
        num_layers = min(num_layers, split_of(critic, sizes).largest)
    # each recomputed layer saves memory: no number before the first fitting one fits
    numbers = range(1, num_layers)
    fewest = bisect.bisect_left(numbers, True, key=lambda number: fits(_first_layers(number)))
    choices: list[dict[str, Any]] = [NOTHING, MLP, *map(_first_layers, numbers[fewest : fewest + 1]), ALL_LAYERS]
    choices.sort(key=lambda keys: recomputed_share(_with(config, keys), actor))
    return next((keys for keys in choices if fits(keys)), None)


def recomputed_share(config: Config, spec: ModelSpec) -> float:
    """Return the share of the layers' forward pass repeated in backward.

    All of it with full recompute by the method uniform, and the share of the layers with block.
    With selective, the part of a layer's parameters; 0 for core_attn: at packed lengths its
    products are few beside a layer's.
    """
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.recompute_granularity == "none":
        return 0.0
    if megatron.recompute_granularity == "selective":
        mlp = 3 * spec.mean_active_ffn_size
        attention = attention_weights(spec) / spec.hidden_size
        return mlp / (mlp + attention) if "mlp" in megatron.recompute_modules else 0.0
    if megatron.recompute_method == "uniform":
        return 1.0
    chunks = split_of(spec, parallel_sizes(config)).layers
    return sum(min(megatron.recompute_num_layers, layers) for layers in chunks) / spec.num_layers


def _first_layers(number: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": number}


def _with(config: Config, keys: Mapping[str, Any]) -> Config:
    actor = config.actor_rollout_ref.actor
    actor = actor.model_copy(update={"megatron": actor.megatron.model_copy(update=dict(keys))})
    section = config.actor_rollout_ref.model_copy(update={"actor": actor})
    return config.model_copy(update={"actor_rollout_ref": section})


def in_words(megatron: MegatronConfig) -> str:
    """Return the recomputed part: nothing, MLP, all layers, the first 12 layers of each stage."""
    if megatron.recompute_granularity == "selective":
        names = {"core_attn": "attention", "mlp": "MLP"}
        return " and ".join(names[name] for name in megatron.recompute_modules) or "nothing"
    if megatron.recompute_granularity == "none":
        return "nothing"
    if megatron.recompute_method == "uniform":
        return "all layers"
    part = "stage" if megatron.virtual_pipeline_model_parallel_size is None else "chunk of a stage"
    return f"the first {megatron.recompute_num_layers} layers of each {part}"
