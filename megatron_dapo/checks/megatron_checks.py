"""What the keys of Megatron's section demand of each other: sizes, overlaps, FP8, the optimizer's state."""

from collections.abc import Iterator

from megatron_dapo.config.derived import ParallelSizes, parallel_sizes, state_keys, uses_critic
from megatron_dapo.config.key_names import ACTOR, CHUNKS, MEGATRON, STAGES, WORLD
from megatron_dapo.config.keys import show_text
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema.config import Config


def parallel_layout(config: Config) -> Iterator[Mistake]:
    sizes = parallel_sizes(config)
    megatron = config.actor_rollout_ref.actor.megatron
    context = f" x context_parallel_size {sizes.cp}" if sizes.cp > 1 else ""
    if sizes.world % (sizes.tp * sizes.pp * sizes.cp):
        yield Mistake(
            (*WORLD, *STAGES),
            f"The world size is {sizes.world} (trainer.nnodes {config.trainer.nnodes} x trainer.n_procs_per_node "
            f"{config.trainer.n_procs_per_node}), not a multiple of {sizes.tp * sizes.pp * sizes.cp} "
            f"({MEGATRON}.tensor_model_parallel_size {sizes.tp} x pipeline_model_parallel_size {sizes.pp}{context}); "
            f"change one of them.",
        )
    if sizes.tp * sizes.num_copies % (sizes.ep * sizes.etp):
        cut = f" x expert_tensor_parallel_size {sizes.etp}" if sizes.etp > 1 else ""
        yield Mistake(
            (f"{MEGATRON}.expert_model_parallel_size", f"{MEGATRON}.expert_tensor_parallel_size", *WORLD, *STAGES),
            f"{MEGATRON}.expert_model_parallel_size is {sizes.ep}{cut}, but does not divide the "
            f"{sizes.tp * sizes.num_copies} ranks of a pipeline stage (TP {sizes.tp} x "
            f"{f'CP {sizes.cp} x ' if sizes.cp > 1 else ''}DP {sizes.dp}); choose a divisor.",
        )
    if sizes.cp > 1 and not config.actor_rollout_ref.model.use_remove_padding:
        yield Mistake(
            (f"{MEGATRON}.context_parallel_size", "actor_rollout_ref.model.use_remove_padding"),
            f"{MEGATRON}.context_parallel_size is {sizes.cp}, which cuts packed micro-batches, but "
            f"actor_rollout_ref.model.use_remove_padding is false; set it to true, or context_parallel_size to 1.",
        )
    if sizes.cp > 1 and megatron.use_transformer_engine == "off":
        yield Mistake(
            (f"{MEGATRON}.context_parallel_size", f"{MEGATRON}.use_transformer_engine"),
            f"{MEGATRON}.context_parallel_size is {sizes.cp}, which on GPUs Transformer Engine computes, but "
            f"use_transformer_engine is off; set it to auto, or context_parallel_size to 1.",
        )
    if megatron.sequence_parallel and sizes.tp == 1:
        yield Mistake(
            (f"{MEGATRON}.sequence_parallel", f"{MEGATRON}.tensor_model_parallel_size"),
            f"{MEGATRON}.sequence_parallel is true, but tensor_model_parallel_size is 1; raise it, or set "
            f"sequence_parallel to false.",
        )
    if sizes.vpp is not None and (sizes.pp == 1 or sizes.vpp == 1):
        yield Mistake(
            (f"{MEGATRON}.virtual_pipeline_model_parallel_size", f"{MEGATRON}.pipeline_model_parallel_size"),
            f"{MEGATRON}.virtual_pipeline_model_parallel_size is {sizes.vpp} with pipeline_model_parallel_size "
            f"{sizes.pp}; the interleaved schedule needs at least 2 of both, null is the plain one.",
        )
    yield from _pipeline_layers(sizes)


def _pipeline_layers(sizes: ParallelSizes) -> Iterator[Mistake]:
    layers = sizes.pipeline_layers
    num_chunks = sizes.pp * (sizes.vpp or 1)
    if layers is None:
        return
    vpp = f" x virtual_pipeline_model_parallel_size {sizes.vpp}" if sizes.vpp else ""
    if len(layers) != num_chunks:
        yield Mistake(
            CHUNKS,
            f"{MEGATRON}.pipeline_layers is {list(layers)}, but there are {num_chunks} chunks "
            f"(pipeline_model_parallel_size {sizes.pp}{vpp}); give each its number of layers, or null.",
        )
    elif 0 in layers[1:-1]:
        yield Mistake(
            CHUNKS,
            f"{MEGATRON}.pipeline_layers is {list(layers)}, but only the first chunk, which has the embedding, and the "
            f"last, which has the head, may have 0 layers; give all others one or more.",
        )


def overlaps(config: Config) -> Iterator[Mistake]:
    megatron = config.actor_rollout_ref.actor.megatron
    for name in ("use_distributed_optimizer", "overlap_grad_reduce"):
        if megatron.overlap_param_gather and not getattr(megatron, name):
            yield Mistake(
                (f"{MEGATRON}.overlap_param_gather", f"{MEGATRON}.{name}"),
                f"{MEGATRON}.overlap_param_gather is true, but {name} is false; set that to true, or "
                f"overlap_param_gather to false.",
            )


def user_buffers(config: Config) -> Iterator[Mistake]:
    megatron = config.actor_rollout_ref.actor.megatron
    key = f"{MEGATRON}.tp_comm_overlap"
    if not megatron.tp_comm_overlap:
        return

    def mistake(other: str, why: str) -> Mistake:
        return Mistake((key, other), f"{key} is true, but {why}, or tp_comm_overlap to false.")

    tp = megatron.tensor_model_parallel_size
    if not megatron.sequence_parallel:
        yield mistake(f"{MEGATRON}.sequence_parallel", "sequence_parallel is false; set it to true (with TP above 1)")
    if config.trainer.n_procs_per_node % tp:
        yield mistake(
            f"{MEGATRON}.tensor_model_parallel_size",
            f"the {config.trainer.n_procs_per_node} ranks of a node (trainer.n_procs_per_node) are no multiple of "
            f"tensor_model_parallel_size {tp}, whose ranks share buffers in one node; set it to a divisor",
        )
    if not config.actor_rollout_ref.model.use_remove_padding:
        yield mistake(
            "actor_rollout_ref.model.use_remove_padding",
            "use_remove_padding is false, and padded micro-batches are not all of one size; set it to true",
        )
    if megatron.use_transformer_engine == "off":
        yield mistake(
            f"{MEGATRON}.use_transformer_engine",
            "use_transformer_engine is off, whose buffers these are; set it to auto",
        )
    if megatron.dtype == "float32":
        yield mistake(f"{MEGATRON}.dtype", "dtype is float32; set it to bfloat16")
    if megatron.fp8 != "none":
        yield mistake(f"{MEGATRON}.fp8", f"fp8 is {megatron.fp8}, for which the buffers are not made; set it to none")
    if uses_critic(config):
        yield mistake(
            "algorithm.adv_estimator",
            f"{config.algorithm.adv_estimator} has a critic, and a process has buffers for one model; set "
            f"algorithm.adv_estimator to one without",
        )


def fp8(config: Config) -> Iterator[Mistake]:
    megatron = config.actor_rollout_ref.actor.megatron
    state = f"{MEGATRON}.fp8 is {megatron.fp8}"
    if megatron.fp8 == "none":
        return
    if megatron.use_transformer_engine == "off":
        yield Mistake(
            (f"{MEGATRON}.fp8", f"{MEGATRON}.use_transformer_engine"),
            f"{state}, which Transformer Engine computes, but use_transformer_engine is off; "
            f"set it to auto, or fp8 to none.",
        )
    if megatron.dtype == "float32":
        yield Mistake(
            (f"{MEGATRON}.fp8", f"{MEGATRON}.dtype"),
            f"{state}, but dtype is float32; set dtype to bfloat16, or fp8 to none.",
        )


# What bfloat16's 8 bits keep of a moment: a step of less than half a unit in the last place is rounded away, and of a
# moment that should fall the step is 1 - beta of it at most.
_BFLOAT16_STEP = 2**-8


def optimizer_state(config: Config) -> Iterator[Mistake]:
    megatron = config.actor_rollout_ref.actor.megatron
    asked = state_keys(megatron)
    needed = {"use_distributed_optimizer": (False, "true"), "dtype": ("float32", "bfloat16"),
              "use_transformer_engine": ("off", "auto")}  # fmt: skip
    for name, value in asked.items():
        for other, (refused, cure) in needed.items():
            if getattr(megatron, other) == refused:
                yield Mistake(
                    (f"{MEGATRON}.{name}", f"{MEGATRON}.{other}"),
                    f"{MEGATRON}.{name} is {show_text(value)}, but {other} is {show_text(refused)}; set it to {cure}, "
                    f"or leave {name} out.",
                )
    halved = [name for name, value in asked.items() if value == "bfloat16"]
    if megatron.optimizer_offload_fraction:
        for name in halved:
            yield Mistake(
                (f"{MEGATRON}.optimizer_offload_fraction", f"{MEGATRON}.{name}"),
                f"{MEGATRON}.{name} is bfloat16, but optimizer_offload_fraction is "
                f"{megatron.optimizer_offload_fraction:g}, and what the machine's memory holds is stepped in float32; "
                f"leave one of them out.",
            )
    yield from _moments_that_would_not_move(config, halved)


def _moments_that_would_not_move(config: Config, halved: list[str]) -> Iterator[Mistake]:
    betas = {f"{ACTOR}.optim.betas": config.actor_rollout_ref.actor.optim.betas}
    if uses_critic(config):
        betas["critic.optim.betas"] = config.critic.optim.betas
    for name in halved:
        for key, pair in betas.items():
            beta = pair[name == "exp_avg_sq_dtype"]
            if 1 - beta <= _BFLOAT16_STEP:
                yield Mistake(
                    (f"{MEGATRON}.{name}", key),
                    f"{MEGATRON}.{name} is bfloat16, but {key} has {beta:g}, with which a moment in bfloat16 never "
                    f"falls; set {name} to float32, or that beta below {1 - _BFLOAT16_STEP:.3f}.",
                )


MEGATRON_CHECKS = (parallel_layout, overlaps, fp8, user_buffers, optimizer_state)
