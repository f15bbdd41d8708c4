"""GPU memory of a trainer before its start, from config and model sizes: its fullest rank.

Weights, gradients and optimizer state are counted exactly, parameter by parameter; Megatron pads
its buffers by less than 128 x DP numbers each. The rest are upper estimates, each at its own peak,
although the peaks do not coincide. `usable_memory` leaves room for CUDA, NCCL and workspaces.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache

from megatron_dapo.common.sizes import GB, MIB, ceil_div, round_up
from megatron_dapo.config.built_ins import POLICY_LOSSES
from megatron_dapo.config.derived import (
    ParallelSizes,
    critic_batching,
    log_prob_chunk_size,
    longest_sample,
    needs_reference,
    offload_fraction,
    parallel_sizes,
    samples_per_rollout_step,
    shares_gpus,
    uses_critic,
    uses_full_kl,
    uses_servers,
    world_size,
)
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.layer_memory import CHUNK, kept_per_token
from megatron_dapo.estimates.pipeline import kinds_of, split_of
from megatron_dapo.huggingface.lora_settings import LoraSettings, actor_is_reference, lora_settings
from megatron_dapo.huggingface.model_families import FAMILIES
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import product_weights, rows_of_layer
from megatron_dapo.huggingface.weight_rows import ROUTER_BIAS

MAIN_GRADIENT = 4  # bytes: `grad_reduce_in_fp32`
MAIN_PARAMETER = 4  # bytes: float32, beside parameters in half precision
# Bytes of a parameter with its optimizer state on the host: float32 weight, two moments, gradient.
ON_THE_HOST = 16
# Forward, dgrad, wgrad of a layer's 4 products (TE 2.20, pytorch/module/base.py: initialize_ub).
NUM_USER_BUFFERS = 12
# Of a loss by autograd: statistics of the logits, and the merged ones (4 each); the 7 fields of
# `algorithms.sequence_loss.LossSequence`, and the same again.
FLOATS_PER_TOKEN = 8 + 2 * 7
# Bytes of a trainer GPU outside all parts below: the CUDA context with its kernels, the buffers of
# NCCL's communicators (2 to 4 GB with several GPUs), workspaces (products, attention, allocator).
CUDA_CONTEXT = 0.5 * GB
NCCL_BUFFERS = 4 * GB
WORKSPACES = 1.5 * GB
# Bytes that stay on a shared GPU while its other user works. Of a trainer rank: alone, and with
# NCCL's buffers of 7 GB (dense), 9.5 GB (experts) on 8 H100 (verl, pull request 6408). Of a
# sleeping server: context and workspaces. Estimates.
RANK_ALONE, RANK, RANK_WITH_EXPERTS = 1.5 * GB, 9 * GB, 11 * GB
SERVER_ALONE, SERVER = 2 * GB, 3 * GB


def kept_free(config: Config, actor: ModelSpec) -> float:
    """Return the bytes of a trainer GPU outside the parts of `trainer_memory`; on a shared GPU with
    those of its sleeping server."""
    if shares_gpus(config):
        return kept_by_trainer(config, actor) + kept_by_server(config)
    if (gigabytes := config.trainer.gpu_reserve_gb) is not None:
        return gigabytes * GB
    return CUDA_CONTEXT + WORKSPACES + (NCCL_BUFFERS if world_size(config) > 1 else 0)


def kept_by_trainer(config: Config, actor: ModelSpec) -> float:
    """Return the bytes of a shared GPU that a trainer rank never gives back."""
    if (gigabytes := config.trainer.gpu_reserve_gb) is not None:
        return gigabytes * GB
    if world_size(config) == 1:
        return RANK_ALONE
    return RANK if actor.moe is None else RANK_WITH_EXPERTS


def kept_by_server(config: Config) -> float:
    """Return the bytes of a shared GPU that a sleeping server never gives back."""
    return SERVER_ALONE if world_size(config) == 1 else SERVER


def usable_memory(config: Config, actor: ModelSpec) -> float:
    """Return the bytes of a trainer GPU for `trainer_memory`."""
    return max(config.trainer.gpu_memory_gb * GB - kept_free(config, actor), 0.0)


@dataclass(frozen=True)
class Parts:
    """Bytes of each part of a trainer rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    log_prob_head: int
    weight_sync: int
    reference: int
    critic: int
    user_buffers: int = 0
    routed_experts: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_name.values())

    @property
    def by_name(self) -> dict[str, int]:
        """Return the bytes of each part by its name, the largest first, without unused parts."""
        sizes = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}
        return dict(sorted(((name, size) for name, size in sizes.items() if size), key=lambda item: -item[1]))


@dataclass(frozen=True)
class States:
    """Permanent bytes of one model on one rank."""

    weights: int
    gradients: int
    optimizer: int  # the mean over the data-parallel ranks of its shards

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def trainer_memory(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> Parts:
    """Return the memory of the fullest pipeline stage. critic: the spec, with or without a value
    head, of a critic of another size than the actor."""
    stages = [_stage(config, actor, (critic or actor).as_critic(), stage) for stage in range(parallel_sizes(config).pp)]
    return max(stages, key=lambda parts: parts.total)


def _stage(config: Config, actor: ModelSpec, critic: ModelSpec, stage: int) -> Parts:
    sizes = parallel_sizes(config)
    states = model_states(config, actor, stage)
    tokens = _of_rank(config, config.actor_rollout_ref.actor.max_tokens_per_microbatch)
    activations = activation_bytes(config, actor, stage, tokens)
    critic_total = 0
    if uses_critic(config):
        critic_total = model_states(config, critic, stage).total
        its_tokens = _of_rank(config, critic_batching(config).max_tokens_per_microbatch)
        activations = max(activations, activation_bytes(config, critic, stage, its_tokens))
    is_last = stage == sizes.pp - 1
    reference = reference_weights(config, actor, stage)
    if uses_full_kl(config) and is_last:
        reference += _kept_for_full_kl(config, actor)
    return Parts(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=activations,
        log_prob_head=head_bytes(config, actor, tokens) if is_last else 0,
        # shared GPUs are pushed to when gradients and optimizer state are gone: `push_memory`
        weight_sync=weight_sync_bytes(config, actor) if uses_servers(config) and not shares_gpus(config) else 0,
        reference=reference,
        critic=critic_total,
        user_buffers=_user_buffers(config, actor, tokens),
        routed_experts=_routed_experts(config, actor, stage, tokens),
    )


def reference_weights(config: Config, actor: ModelSpec, stage: int) -> int:
    """Return the bytes of a stage's weights of the reference; 0 if there is none of its own."""
    if not needs_reference(config) or actor_is_reference(config):
        return 0
    weights = sum(num_parameters(actor, parallel_sizes(config), stage)) * dtype_bytes(config)
    return weights + _fp8_copies(config, actor, stage) // 2  # no transposed ones: forward only


def _user_buffers(config: Config, spec: ModelSpec, tokens: int) -> int:
    """Return the bytes of Transformer Engine's user buffers: one for each kind of product, with the
    whole activations of a micro-batch's tokens."""
    overlaps = config.actor_rollout_ref.actor.megatron.tp_comm_overlap
    return NUM_USER_BUFFERS * tokens * spec.hidden_size * dtype_bytes(config) if overlaps else 0


def _routed_experts(config: Config, spec: ModelSpec, stage: int, tokens: int) -> int:
    """Return the bytes of a stage's experts in router replay, an int16 for each choice, for so many
    tokens of a context-parallel rank (training/expert_cut.py)."""
    if spec.moe is None or config.actor_rollout_ref.actor.router_replay == "off":
        return 0
    sizes = parallel_sizes(config)
    part = sizes.tp if config.actor_rollout_ref.actor.megatron.sequence_parallel else 1
    layers = sum(map(spec.has_experts, split_of(spec, sizes).numbers_of(stage)))
    return ceil_div(tokens, part) * layers * spec.moe.experts_per_token * 2


def routed_experts_on_host(config: Config, spec: ModelSpec) -> int:
    """Return the bytes of a node's memory for the routed experts of a rollout step, with all
    samples at their longest."""
    sizes = parallel_sizes(config)
    tokens = ceil_div(samples_per_rollout_step(config), sizes.dp) * _of_rank(config, longest_sample(config))
    largest = max(_routed_experts(config, spec, stage, tokens) for stage in range(sizes.pp))
    return largest * config.trainer.n_procs_per_node


def num_parameters(spec: ModelSpec, sizes: ParallelSizes, stage: int) -> tuple[int, int]:
    """Return a rank's parameters of a stage: (shared by all data-parallel ranks, of experts). TP
    cuts the model by columns and rows (arXiv 1909.08053, section 3), by its weight rows."""
    layers = split_of(spec, sizes).numbers_of(stage)
    shared, expert = _of_layers(spec, layers, _parameters_of_layer, sizes.tp, sizes.etp)
    vocabulary = spec.padded_vocab_size(sizes.tp) // sizes.tp * spec.hidden_size
    shared += vocabulary if stage == 0 else 0
    if stage == sizes.pp - 1:
        is_same = spec.tied_embeddings and sizes.pp == 1
        shared += spec.hidden_size + (spec.hidden_size + 1 if spec.value_head else 0 if is_same else vocabulary)
    return shared, expert * (spec.moe.num_experts if spec.moe else 0) // sizes.ep


def num_all_parameters(spec: ModelSpec) -> int:
    """Return the parameters of the whole model."""
    return sum(num_parameters(spec, ParallelSizes(tp=1, pp=1, vpp=None, world=1), stage=0))


def num_expert_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters in one expert of a layer."""
    return _parameters_of_layer(spec, spec.num_layers - 1, 1, 1)[1]


CountOfLayer = Callable[[ModelSpec, int, int, int], tuple[int, int]]
"""(model, layer, TP, ETP) -> counts of the layer on a rank: (all but experts', one expert's)."""


def _of_layers(spec: ModelSpec, layers: Sequence[int], count: CountOfLayer, tp: int, etp: int) -> tuple[int, int]:
    """Return the sums over these layers, from one layer of each kind."""
    shared = expert = 0
    for layer, number in kinds_of(spec, layers).items():
        of_shared, of_expert = count(spec, layer, tp, etp)
        shared += number * of_shared
        expert += number * of_expert
    return shared, expert


@cache
def _parameters_of_layer(spec: ModelSpec, layer: int, tp: int, etp: int) -> tuple[int, int]:
    """Return the parameters of a layer on a rank: (all but experts', one expert's)."""
    counts = {True: 0, False: 0}
    for row in rows_of_layer(spec, layer):
        if not row.hf[0].endswith(ROUTER_BIAS):  # no parameter
            num_ranks = 1 if row.cut is None else etp if row.of_experts else tp
            counts[row.of_experts] += sum(map(math.prod, row.shapes(spec))) // num_ranks
    return counts[False], counts[True]


def _router_biases(spec: ModelSpec, sizes: ParallelSizes, stage: int) -> int:
    """Return the bytes of the routers' biases on a rank of a stage: float32, without gradient or
    optimizer state."""
    if spec.moe is None or not spec.moe.has_bias:
        return 0
    return 4 * spec.moe.num_experts * sum(map(spec.has_experts, split_of(spec, sizes).numbers_of(stage)))


def _decays(spec: ModelSpec, sizes: ParallelSizes, stage: int) -> int:
    """Return the delta nets' decays on a rank of a stage: float32 parameters at any type."""
    if spec.delta_net is None:
        return 0
    layers = split_of(spec, sizes).numbers_of(stage)
    return sum(not spec.has_attention(layer) for layer in layers) * spec.delta_net.num_value_heads // sizes.tp


def num_trained_parameters(
    spec: ModelSpec, sizes: ParallelSizes, stage: int, lora: LoraSettings | None
) -> tuple[int, int]:
    """Return the trained parameters of one rank of a stage, in the two kinds of `num_parameters`:
    all of them, or with LoRA the adapters."""
    if lora is None:
        return num_parameters(spec, sizes, stage)
    layers = split_of(spec, sizes).numbers_of(stage)
    shared, expert = adapter_parameters(spec, lora, layers, sizes.tp, sizes.etp)
    return shared, expert * spec.moe.num_experts // sizes.ep if spec.moe is not None else 0


def adapter_parameters(
    spec: ModelSpec, lora: LoraSettings, layers: Sequence[int], tp: int = 1, etp: int = 1
) -> tuple[int, int]:
    """Return a rank's parameters in the adapters (models/lora.py) of these layers, numbered from 0:
    (all but experts', one expert's in each layer with experts)."""

    def of_layer(spec: ModelSpec, layer: int, tp: int, etp: int) -> tuple[int, int]:
        counts = {True: 0, False: 0}
        for row in rows_of_layer(spec, layer):
            num_ranks = etp if row.of_experts else tp
            for name, (outputs, inputs) in zip(row.modules, row.shapes(spec), strict=False):
                if name in lora.targets:  # A: columns of the weight on this rank; B: its rows
                    columns = inputs // (num_ranks if row.cut == 1 else 1)
                    counts[row.of_experts] += lora.rank * (columns + outputs // (num_ranks if row.cut == 0 else 1))
        return counts[False], counts[True]

    return _of_layers(spec, layers, of_layer, tp, etp)


def model_states(config: Config, spec: ModelSpec, stage: int) -> States:
    """Return the bytes of weights, float32 gradients and optimizer state of a model on a rank.

    The state is Adam's two moments and a half-precision model's float32 weights. The three take 2 +
    4 + 12 bytes per parameter (arXiv 1910.02054, section 3.1); with LoRA 2 for frozen ones, 18 for
    adapters. The distributed optimizer shards the state over DP x CP, for experts over the ranks
    with the same experts. Of a rank's share Megatron offloads whole tensors until their part is
    reached.
    """
    sizes = parallel_sizes(config)
    width = dtype_bytes(config)
    num_weights = sum(num_parameters(spec, sizes, stage))
    lora = lora_settings(config)
    shared, experts = num_trained_parameters(spec, sizes, stage, lora)
    if lora is not None:
        num_weights += shared + experts
    megatron = config.actor_rollout_ref.actor.megatron
    state = moment_bytes(config) + (MAIN_PARAMETER if width < 4 else 0)
    by_dp, by_expert_dp = 1, 1
    if megatron.use_distributed_optimizer:
        by_dp = sizes.num_copies
        by_expert_dp = sizes.expert_dp
    decays = _decays(spec, sizes, stage) if width < MAIN_PARAMETER else 0  # their own float32 weights
    of_shared = shared * state - (decays * MAIN_PARAMETER if lora is None else 0)
    optimizer = ceil_div(of_shared, by_dp) + ceil_div(experts * state, by_expert_dp)
    beyond = decays * (MAIN_PARAMETER - width) + _router_biases(spec, sizes, stage)
    return States(
        weights=num_weights * width + beyond + _fp8_copies(config, spec, stage),
        gradients=(shared + experts) * MAIN_GRADIENT,
        optimizer=round(optimizer * (1 - offload_fraction(config))),
    )


def _fp8_copies(config: Config, spec: ModelSpec, stage: int) -> int:
    """Return the bytes of a stage's matrices in FP8: as they are and transposed, 1 byte each.
    Transformer Engine makes them in the first micro-batch after an optimizer step and keeps them
    (TE 2.20, pytorch/module/base.py: get_weight_workspace). FP8 inputs count as bfloat16."""
    if config.actor_rollout_ref.actor.megatron.fp8 == "none":
        return 0
    sizes = parallel_sizes(config)
    kinds = kinds_of(spec, split_of(spec, sizes).numbers_of(stage))
    return 2 * sum(number * product_weights(spec, layer) for layer, number in kinds.items()) // sizes.tp


def host_memory(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> int:
    """Return the bytes of a node's memory for the offloaded optimizer state of actor and critic
    (`optimizer_offload_fraction`). All ranks of the node count as ranks of the largest stage."""
    sizes = parallel_sizes(config)
    fraction = offload_fraction(config)
    specs = [actor, (critic or actor).as_critic()] if uses_critic(config) else [actor]

    def of_rank(stage: int) -> float:
        counts = [num_trained_parameters(spec, sizes, stage, lora_settings(config)) for spec in specs]
        return sum(shared / sizes.num_copies + experts / sizes.expert_dp for shared, experts in counts)

    largest = max(of_rank(stage) for stage in range(sizes.pp))
    return round(largest * fraction * ON_THE_HOST * config.trainer.n_procs_per_node)


def activation_bytes(config: Config, spec: ModelSpec, stage: int, tokens: int) -> int:
    """Return the bytes kept for backward by micro-batches in flight, and of computing one layer.

    The method is arXiv 2205.05198's, section 4: tensors kept per operation. 1F1B keeps PP - stage
    micro-batches; with full recompute a layer keeps only its input. This program's layers have
    RMSNorm with float32 statistics, flash attention, gated MLP, no dropout. Chunks of a stage count
    as its largest one. tokens: of one micro-batch, on one context-parallel rank.
    """
    sizes = parallel_sizes(config)
    width = dtype_bytes(config)
    megatron = config.actor_rollout_ref.actor.megatron
    part = sizes.tp if megatron.sequence_parallel else 1
    chunks = split_of(spec, sizes).chunks_of(stage)
    layers = max(chunks) * len(chunks)
    number = megatron.recompute_num_layers
    recomputed = min(number, max(chunks)) * len(chunks)  # method block: Megatron counts by chunk
    entry = spec.hidden_size * width / part
    per_token = kept_per_token(spec, sizes, width, part, split_of(spec, sizes).numbers_of(stage))
    whole = per_token.total
    if megatron.recompute_granularity == "full" and megatron.recompute_method == "uniform":
        kept = layers / number * entry
        computed = number * whole
    elif megatron.recompute_granularity == "full":
        kept = recomputed * entry + (layers - recomputed) * whole
        computed = whole
    elif megatron.recompute_granularity == "selective":
        left_out = {"core_attn": per_token.core, "mlp": per_token.mlp}
        kept = layers * (whole - sum(left_out[name] for name in megatron.recompute_modules))
        computed = whole
    else:
        kept = layers * whole
        computed = 0.0
    # of one layer: a product's gathered input, its gradient, and that of the MLP's widest product
    ffn = spec.active_ffn_size if spec.moe else spec.ffn_size / sizes.tp
    computed += (2 * spec.hidden_size + 2 * ffn) * width
    if (net := spec.delta_net) is not None:  # the states before each chunk, and their gradients
        computed += 2 * net.num_value_heads * net.key_dim * net.value_dim / CHUNK * width / sizes.tp
    return round(tokens * (kept * _in_flight(sizes, stage) + computed))


def _in_flight(sizes: ParallelSizes, stage: int) -> float:
    """Return the number of a stage's micro-batches before their backward pass, counted in stages:
    under 1F1B, or in the warm-up of the interleaved schedule
    (megatron.core.pipeline_parallel.schedules.get_pp_rank_microbatches)."""
    behind = sizes.pp - stage - 1
    if not sizes.vpp:
        return behind + 1
    return (2 * behind + (sizes.vpp - 1) * sizes.pp + 1) / sizes.vpp


def head_bytes(config: Config, spec: ModelSpec, tokens: int) -> int:
    """Return the bytes of the log-prob head (kernels/logits_chunk.py, kernels/fused_head.py). A
    chunk has float32 logits and their gradient; its hidden states, with sequence parallelism the
    next ones in transit, and a float32 gradient. Added is the gradient of all hidden states.
    Without the fused head: `_composed_head_bytes`."""
    sizes = parallel_sizes(config)
    width = dtype_bytes(config)
    actor = config.actor_rollout_ref.actor
    part = sizes.tp if actor.megatron.sequence_parallel else 1
    rows = min(tokens, log_prob_chunk_size(config, on_gpu=True))
    columns = spec.padded_vocab_size(sizes.tp) // sizes.tp
    is_over_sequences = actor.loss_function is not None or POLICY_LOSSES[actor.policy_loss].over_sequences
    if is_over_sequences or actor.fused_kernels == "off":
        kernels = actor.fused_kernels != "off"
        return _composed_head_bytes(tokens, rows, columns, spec.hidden_size, width, kernels=kernels)
    chunk = rows * columns * (4 + width) + rows * spec.hidden_size * (3 * width + 4)
    return chunk + tokens * spec.hidden_size * width // part


def _composed_head_bytes(tokens: int, rows: int, columns: int, hidden: int, width: int, *, kernels: bool) -> int:
    """Return the bytes of log-probs with autograd after backward (kernels/linear_logprob.py).

    This head serves every loss with fused_kernels off, gspo and a user's own loss: the last two
    need log-probs of whole sequences before any gradient. From forward to backward it keeps the
    hidden states of every row, whole on each tensor-parallel rank, and each token's statistics. The
    logits are computed again, a chunk at a time. Backward adds the hidden states' gradient, of the
    same size, and the weight's, in float32 and in its dtype. The fused head adds that to Megatron's
    buffer. A chunk is float32 logits and their gradient in the dtype; without the kernels both are
    float32, and so is a copy of the weight. Tensors of the user's function come on top.

    rows, columns: of a chunk of logits. width: bytes of the model's dtype.
    """
    narrow = width if width < MAIN_GRADIENT else 0  # a copy, unless the dtype is float32
    per_row = 2 * width + 4 if kernels else width + 8
    chunk = rows * columns * (4 + width if kernels else 8) + rows * hidden * per_row
    weight = columns * hidden * (MAIN_GRADIENT + narrow + (0 if kernels or not narrow else 4))
    return chunk + weight + tokens * (2 * hidden * width + 4 * FLOATS_PER_TOKEN)


def weight_sync_bytes(config: Config, spec: ModelSpec) -> int:
    """Return the bytes of two flat buckets (weight_sync/sender.py) and of the bucket in gathering,
    in slices and whole. A larger tensor is a bucket of its own: the embedding, an MLP's, or a stack
    of all experts'. Stacks follow one another: two more are under way meanwhile."""
    bucket = config.weight_sync.bucket_size_mb * MIB
    row = spec.hidden_size * dtype_bytes(config)
    largest = max(spec.vocab_size, spec.ffn_size, spec.dense_ffn_size) * row
    if spec.moe is None or not FAMILIES[spec.family].has_stacked_experts:
        return 2 * bucket + 2 * max(bucket, largest)
    down = spec.moe.num_experts * spec.ffn_size * row
    stacks = (2 * down, down)  # of gate and up, and of down
    return 2 * bucket + 2 * max(bucket, largest, *stacks) + sum(stack for stack in stacks if stack > bucket)


def _kept_for_full_kl(config: Config, spec: ModelSpec) -> int:
    """Return the bytes of the reference's last hidden states of a rollout step, all responses at
    their longest, and of its chunk of logits."""
    sizes = parallel_sizes(config)
    actor = config.actor_rollout_ref.actor
    sharing = sizes.num_copies * (sizes.tp if actor.megatron.sequence_parallel else 1)
    tokens = ceil_div(samples_per_rollout_step(config) * config.data.max_response_length, sharing)
    chunk = log_prob_chunk_size(config, on_gpu=True) * spec.padded_vocab_size(sizes.tp) // sizes.tp * 4
    return tokens * spec.hidden_size * dtype_bytes(config) + chunk


def dtype_bytes(config: Config) -> int:
    """Return the bytes of one parameter or activation; auto is bfloat16, as on a GPU."""
    return 4 if config.actor_rollout_ref.actor.megatron.dtype == "float32" else 2


def moment_bytes(config: Config) -> int:
    """Return the bytes of Adam's two moments of a parameter."""
    megatron = config.actor_rollout_ref.actor.megatron
    return sum(2 if dtype == "bfloat16" else 4 for dtype in (megatron.exp_avg_dtype, megatron.exp_avg_sq_dtype))


def _of_rank(config: Config, tokens: int) -> int:
    """Return a context-parallel rank's tokens of a micro-batch, rounded up to a multiple of TP."""
    sizes = parallel_sizes(config)
    return round_up(ceil_div(tokens, sizes.cp), sizes.tp)
