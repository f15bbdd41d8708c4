"""Checks across Megatron's keys: sizes, overlaps, FP8, the optimizer's state."""

from collections.abc import Iterator

from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.config.derived import uses_critic, world_size
from megatron_dapo.config.key_names import ACTOR, MEGATRON
from megatron_dapo.config.keys import show_text, value_of
from megatron_dapo.config.schema.config import Config


def _world(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    tp = megatron.tensor_model_parallel_size
    pp = megatron.pipeline_model_parallel_size
    cp = megatron.context_parallel_size
    context = f" x context_parallel_size {cp}" if cp > 1 else ""
    if world_size(config) % (tp * pp * cp):
        yield (
            f"The world size is {world_size(config)} (trainer.nnodes {config.trainer.nnodes} x "
            f"trainer.n_procs_per_node {config.trainer.n_procs_per_node}), not a multiple of {tp * pp * cp} "
            f"({MEGATRON}.tensor_model_parallel_size {tp} x pipeline_model_parallel_size {pp}{context}); change one of "
            f"them."
        )


def _expert_ranks(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    tp = megatron.tensor_model_parallel_size
    cp = megatron.context_parallel_size
    dp = world_size(config) // (tp * cp * megatron.pipeline_model_parallel_size)
    ep = megatron.expert_model_parallel_size
    etp = megatron.expert_tensor_parallel_size
    if tp * cp * dp % (ep * etp):
        cut = f" x expert_tensor_parallel_size {etp}" if etp > 1 else ""
        yield (
            f"{MEGATRON}.expert_model_parallel_size is {ep}{cut}, but does not divide the {tp * cp * dp} ranks of a "
            f"pipeline stage (TP {tp} x {f'CP {cp} x ' if cp > 1 else ''}DP {dp}); choose a divisor."
        )


def _packed_contexts(config: Config) -> Iterator[str]:
    cp = config.actor_rollout_ref.actor.megatron.context_parallel_size
    if cp > 1 and not config.actor_rollout_ref.model.use_remove_padding:
        yield (
            f"{MEGATRON}.context_parallel_size is {cp}, which cuts packed micro-batches, but "
            f"actor_rollout_ref.model.use_remove_padding is false; set it to true, or context_parallel_size to 1."
        )


def _contexts_on_gpus(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    cp = megatron.context_parallel_size
    if cp > 1 and megatron.use_transformer_engine == "off":
        yield (
            f"{MEGATRON}.context_parallel_size is {cp}, which on GPUs Transformer Engine computes, but "
            f"use_transformer_engine is off; set it to auto, or context_parallel_size to 1."
        )


def _sequence_parallelism(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        yield (
            f"{MEGATRON}.sequence_parallel is true, but tensor_model_parallel_size is 1; raise it, or set "
            f"sequence_parallel to false."
        )


def _interleaving(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    pp = megatron.pipeline_model_parallel_size
    vpp = megatron.virtual_pipeline_model_parallel_size
    if vpp is not None and (pp == 1 or vpp == 1):
        yield (
            f"{MEGATRON}.virtual_pipeline_model_parallel_size is {vpp} with pipeline_model_parallel_size "
            f"{pp}; the interleaved schedule needs at least 2 of both, null is the plain one."
        )


def pipeline_layers(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    layers = megatron.pipeline_layers
    if layers is None:
        return
    pp = megatron.pipeline_model_parallel_size
    vpp = megatron.virtual_pipeline_model_parallel_size
    num_chunks = pp * (vpp or 1)
    if len(layers) != num_chunks:
        product = f"{pp} x virtual_pipeline_model_parallel_size {vpp}" if vpp else f"{pp}"
        yield (
            f"{MEGATRON}.pipeline_layers is {layers}, but there are {num_chunks} chunks "
            f"(pipeline_model_parallel_size {product}); give each its number of layers, or null."
        )
    elif 0 in layers[1:-1]:
        yield (
            f"{MEGATRON}.pipeline_layers is {layers}, but only the first chunk, which has the embedding, and the "
            f"last, which has the head, may have 0 layers; give all others one or more."
        )


def _param_gather(config: Config) -> Iterator[str]:
    for name in ("use_distributed_optimizer", "overlap_grad_reduce"):
        yield from known_mistakes([_needed_by_param_gather], config, name)


def _needed_by_param_gather(config: Config, name: str) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.overlap_param_gather and not getattr(megatron, name):
        yield (
            f"{MEGATRON}.overlap_param_gather is true, but {name} is false; set that to true, or "
            f"overlap_param_gather to false."
        )


def _user_buffers(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.actor.megatron.tp_comm_overlap:
        for why in known_mistakes(_AGAINST_USER_BUFFERS, config):
            yield f"{MEGATRON}.tp_comm_overlap is true, but {why}, or tp_comm_overlap to false."


def _whole_sequences(config: Config) -> Iterator[str]:
    if not config.actor_rollout_ref.actor.megatron.sequence_parallel:
        yield "sequence_parallel is false; set it to true (with TP above 1)"


def _ranks_of_a_node(config: Config) -> Iterator[str]:
    tp = config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size
    ranks = config.trainer.n_procs_per_node
    if ranks % tp:
        yield (
            f"the {ranks} ranks of a node (trainer.n_procs_per_node) are no multiple of tensor_model_parallel_size "
            f"{tp}, whose ranks share buffers in one node; set it to a divisor"
        )


def _padded_rows(config: Config) -> Iterator[str]:
    if not config.actor_rollout_ref.model.use_remove_padding:
        yield "use_remove_padding is false, and padded micro-batches are not all of one size; set it to true"


def _no_transformer_engine(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.actor.megatron.use_transformer_engine == "off":
        yield "use_transformer_engine is off, whose buffers these are; set it to auto"


def _float32(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.actor.megatron.dtype == "float32":
        yield "dtype is float32; set it to bfloat16"


def _fp8(config: Config) -> Iterator[str]:
    form = config.actor_rollout_ref.actor.megatron.fp8
    if form != "none":
        yield f"fp8 is {form}, for which the buffers are not made; set it to none"


def _two_models(config: Config) -> Iterator[str]:
    if uses_critic(config):
        yield (
            f"{config.algorithm.adv_estimator} has a critic, and a process has buffers for one model; set "
            f"algorithm.adv_estimator to one without"
        )


_AGAINST_USER_BUFFERS = (
    _whole_sequences,
    _ranks_of_a_node,
    _padded_rows,
    _no_transformer_engine,
    _float32,
    _fp8,
    _two_models,
)


def _fp8_products(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.fp8 != "none" and megatron.use_transformer_engine == "off":
        yield (
            f"{MEGATRON}.fp8 is {megatron.fp8}, which Transformer Engine computes, but use_transformer_engine is off; "
            f"set it to auto, or fp8 to none."
        )


def _fp8_weights(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.fp8 != "none" and megatron.dtype == "float32":
        yield (f"{MEGATRON}.fp8 is {megatron.fp8}, but dtype is float32; set dtype to bfloat16, or fp8 to none.")


# Precision of a moment in bfloat16, of 8 bits: a step below half a unit in the last place is
# rounded away. The step of a falling moment is at most 1 - beta of it.
_BFLOAT16_STEP = 2**-8
_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")  # in the order of betas
# demands of a changed optimizer state: key -> the refused value, and the cure
_NEEDED = {
    "use_distributed_optimizer": (False, "true"),
    "dtype": ("float32", "bfloat16"),
    "use_transformer_engine": ("off", "auto"),
}


def _optimizer_state(config: Config) -> Iterator[str]:
    for name in ("optimizer_offload_fraction", *_MOMENTS):
        for other in _NEEDED:
            yield from known_mistakes([_needed_by_state], config, name, other)


def _needed_by_state(config: Config, name: str, other: str) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    value = getattr(megatron, name)
    refused, cure = _NEEDED[other]
    if value not in (0.0, "float32") and getattr(megatron, other) == refused:
        yield (
            f"{MEGATRON}.{name} is {show_text(value)}, but {other} is {show_text(refused)}; set it to {cure}, or leave "
            f"{name} out."
        )


def _moments(config: Config) -> Iterator[str]:
    for name in _MOMENTS:
        yield from known_mistakes((_offloaded_moment, _actors_moment, _critics_moment), config, name)


def _offloaded_moment(config: Config, name: str) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    fraction = megatron.optimizer_offload_fraction
    if fraction and getattr(megatron, name) == "bfloat16":
        yield (
            f"{MEGATRON}.{name} is bfloat16, but optimizer_offload_fraction is {show_text(fraction)}, and what "
            f"the machine's memory holds is stepped in float32; leave one of them out."
        )


def _actors_moment(config: Config, name: str) -> Iterator[str]:
    yield from _rounded_moment(config, name, f"{ACTOR}.optim.betas")


def _critics_moment(config: Config, name: str) -> Iterator[str]:
    if uses_critic(config):
        yield from _rounded_moment(config, name, "critic.optim.betas")


def _rounded_moment(config: Config, name: str, key: str) -> Iterator[str]:
    """Yield a mistake for a bfloat16 moment rounded back at every step."""
    if getattr(config.actor_rollout_ref.actor.megatron, name) != "bfloat16":
        return
    beta = value_of(config, key)[_MOMENTS.index(name)]
    if 1 - beta <= _BFLOAT16_STEP:
        yield (
            f"{MEGATRON}.{name} is bfloat16, but {key} has {beta:g}, with which a moment in bfloat16 never falls; set "
            f"{name} to float32, or that beta below {1 - _BFLOAT16_STEP:.3f}."
        )


MEGATRON_CHECKS = (
    _world,
    _expert_ranks,
    _packed_contexts,
    _contexts_on_gpus,
    _sequence_parallelism,
    _interleaving,
    pipeline_layers,
    _param_gather,
    _fp8_products,
    _fp8_weights,
    _user_buffers,
    _optimizer_state,
    _moments,
)
