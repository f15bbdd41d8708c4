"""The trainer's time for a rollout step, by a roofline: products, memory traffic, communication,
bubble.

A plain roofline: kernels run one after the other, each for the time of its products or of its
bytes. Nothing is fitted to a run. `Efficiency` has the attained shares of the data sheets' figures,
the same for all models, layouts and GPUs. Left out: sending activations between pipeline stages,
differences between ranks, the host.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dapo.common.sizes import round_up
from megatron_dapo.config.derived import (
    ParallelSizes,
    num_mini_batches,
    offload_fraction,
    parallel_sizes,
    samples_per_rollout_step,
)
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.estimates.flops import (
    TRAINING_PASSES,
    active_adapters_of,
    active_parameters_of,
    attention_flops,
    forward_flops,
    training_flops,
)
from megatron_dapo.estimates.hardware import FP8_SPEED, Hardware
from megatron_dapo.estimates.layer_memory import kept_per_token
from megatron_dapo.estimates.memory import num_parameters, num_trained_parameters
from megatron_dapo.estimates.pipeline import split_of
from megatron_dapo.estimates.recompute import recomputed_share
from megatron_dapo.huggingface.lora_settings import LoraSettings, lora_settings
from megatron_dapo.huggingface.model_spec import ModelSpec

NUM_QUANTILES = 400  # lengths that stand for all: the mean of their squares is right to 1 %
WIDTH = 2  # bytes of bfloat16
GRADIENT = 4  # bytes: Megatron adds gradients up in float32
# Bytes per parameter that Adam reads (gradient, two moments, main weight: 4 each) and writes
# (moments, main weight, and 2 for the model's own).
ADAM_TRAFFIC = 16 + 14
# The same for a parameter with offloaded state, in host memory. Besides, the gradient arrives (4),
# and the new weight is read, written in bfloat16 and fetched (4 + 2 + 2, one of them Adam's 2).
OFFLOADED_TRAFFIC = ADAM_TRAFFIC + 4 + 6


@dataclass(frozen=True)
class Efficiency:
    """Attained shares of the data sheets' figures."""

    matmul: float = 0.65
    """Of the products' peak.

    Llama 3 405B trained at 38 to 43 % of it with all communication (arXiv 2407.21783, table 4).
    cuBLAS by itself reaches 0.6 to 0.8 on an H100, which lowers its clock under load.
    """
    memory: float = 0.7
    """Of the HBM's bandwidth."""
    link: float = 0.75
    """Of NVLink's and the adapters' bandwidth, like nccl-tests' bus bandwidth on a DGX H100."""


@dataclass(frozen=True)
class TrainerLayout:
    """A trainer's cut over GPUs, and its recomputation."""

    sizes: ParallelSizes
    gpus_per_node: int
    sequence_parallel: bool
    recompute: float
    """Forward passes repeated in backward, 0 to 1, of all layers."""
    max_tokens: int
    """Of a micro-batch."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    fp8: bool = False
    offloaded: float = 0.0
    """Share of the optimizer's state in host memory."""
    tp_comm_overlap: bool = False
    """Every micro-batch has max_tokens."""
    lora: LoraSettings | None = None
    """For training adapters only."""


@dataclass(frozen=True)
class TrainingWork:
    """The trainer's work in a rollout step."""

    num_samples: int
    """Per rollout step."""
    responses: Lengths
    prompt: int
    """Mean tokens."""
    mini_batches: int
    """Optimizer steps of one pass."""
    epochs: int = 1
    """Passes."""

    @property
    def num_tokens(self) -> float:
        """Return the tokens of a rollout step, prompts included, padding not."""
        return self.num_samples * (self.prompt + self.responses.mean)

    def num_padded_tokens(self, multiple: int) -> float:
        """Return the same with each sample padded to this multiple."""
        padding = sum(self._lengths(multiple)) - sum(self._lengths())
        return self.num_tokens + padding * self.num_samples / NUM_QUANTILES

    def forward_flops(self, spec: ModelSpec, multiple: int = 1) -> tuple[float, float]:
        """Return the operations of one forward pass over all samples: (layers, padded to this
        multiple; head, without padding)."""
        scale = self.num_samples / NUM_QUANTILES
        layers = forward_flops(spec, self._lengths(multiple), 0)
        return layers * scale, forward_flops(spec, [], sum(self.responses.quantiles(NUM_QUANTILES))) * scale

    def training_flops(self, spec: ModelSpec, lora: LoraSettings | None) -> float:
        """Return the operations of forward and backward over all samples as they are."""
        num_answered = sum(self.responses.quantiles(NUM_QUANTILES))
        return training_flops(spec, self._lengths(), num_answered, lora) * self.num_samples / NUM_QUANTILES

    def attention_flops(self, spec: ModelSpec, multiple: int = 1) -> float:
        """Return attention's part of the operations."""
        return attention_flops(spec, self._lengths(multiple)) * self.num_samples / NUM_QUANTILES

    def _lengths(self, multiple: int = 1) -> list[int]:
        """Return lengths that stand for all samples, with their prompts and padded to this
        multiple."""
        return [round_up(self.prompt + length, multiple) for length in self.responses.quantiles(NUM_QUANTILES)]


@dataclass(frozen=True)
class TrainingTime:
    """Seconds of a rollout step on the trainer's GPUs."""

    update: float
    """Includes tensor, bubble and optimizer."""
    tensor: float
    """Collectives of tensor, context and expert parallel ranks."""
    bubble: float
    """Of the pipeline."""
    optimizer: float
    """Gradients over data-parallel ranks, Adam, weights back."""
    score: float
    """One pass for log-probs."""
    mfu: float
    """Of the update: model FLOPs without recomputation over the peak (PaLM, arXiv 2204.02311,
    appendix B)."""

    def slower_by(self, update: float, score: float) -> "TrainingTime":
        """Return the times with the update and all its parts, and the score, each multiplied by its
        factor."""
        return TrainingTime(
            update=self.update * update,
            tensor=self.tensor * update,
            bubble=self.bubble * update,
            optimizer=self.optimizer * update,
            score=self.score * score,
            mfu=self.mfu / update,
        )


def trainer_layout(config: Config, spec: ModelSpec) -> TrainerLayout:
    """Return the layout that a config asks for."""
    megatron = config.actor_rollout_ref.actor.megatron
    return TrainerLayout(
        parallel_sizes(config),
        config.trainer.n_procs_per_node,
        megatron.sequence_parallel,
        recomputed_share(config, spec),
        config.actor_rollout_ref.actor.max_tokens_per_microbatch,
        megatron.overlap_grad_reduce,
        megatron.overlap_param_gather,
        megatron.fp8 != "none",
        offload_fraction(config),
        megatron.tp_comm_overlap,
        lora_settings(config),
    )


def training_work(config: Config, responses: Lengths, prompt: int, rows: float = 1.0) -> TrainingWork:
    """Return the trainer's work in a config's rollout step. rows: of each trajectory."""
    return TrainingWork(
        round(samples_per_rollout_step(config) * rows),
        responses,
        prompt,
        num_mini_batches(config),
        config.actor_rollout_ref.actor.ppo_epochs,
    )


def training_time(
    spec: ModelSpec, layout: TrainerLayout, work: TrainingWork, hardware: Hardware, efficiency: Efficiency
) -> TrainingTime:
    """Return the trainer's time for a rollout step.

    All pipeline stages wait for the slowest: the last, with the head besides its layers, or one
    with more layers. For m micro-batches a pipeline of P stages in V chunks takes m + (P - 1) / V
    times one of the slowest (arXiv 2104.04473, section 2.2).
    """
    split = split_of(spec, layout.sizes)
    last = layout.sizes.pp - 1
    largest = max(range(last, -1, -1), key=split.layers_of)
    times = [_time_of_stage(spec, layout, stage, work, hardware, efficiency) for stage in {last, largest}]
    slowest = max(times, key=lambda time: time.update)
    return replace(slowest, score=max(time.score for time in times))


def _time_of_stage(
    spec: ModelSpec, layout: TrainerLayout, stage: int, work: TrainingWork, hardware: Hardware, efficiency: Efficiency
) -> TrainingTime:
    """Return the trainer's time for a rollout step if this pipeline stage is the slowest."""
    sizes = layout.sizes
    layers = split_of(spec, sizes).numbers_of(stage)
    num_layers = len(layers)
    share = num_layers / spec.num_layers
    share_of_products = active_parameters_of(spec, layers) / active_parameters_of(spec, range(spec.num_layers))
    multiple = sizes.segment_multiple
    tokens = work.num_padded_tokens(multiple) / sizes.num_copies
    layers_flops, head_flops = work.forward_flops(spec, multiple)
    attention = work.attention_flops(spec, multiple)
    products = layers_flops - attention
    if layout.tp_comm_overlap:
        full = _full_micro_batches(tokens * sizes.cp, work.mini_batches, layout.max_tokens)
        products *= full * layout.max_tokens / (tokens * sizes.cp)
        tokens = full * layout.max_tokens / sizes.cp
    if layout.fp8:  # the products of the layers, not attention; scaling and casting are left out
        products /= FP8_SPEED
    rate = hardware.flops * efficiency.matmul * sizes.tp * sizes.num_copies
    products_s = products * share_of_products / rate
    adapters_s = 2 * active_adapters_of(spec, layers, layout.lora) * tokens * sizes.num_copies / rate
    traffic_s = num_layers * _traffic_s(spec, layout, layers, tokens, hardware, efficiency)
    layers_s = products_s + adapters_s + attention * share / rate + traffic_s
    head_s = head_flops / rate if stage == sizes.pp - 1 else 0.0
    collective_s = _collectives_s(spec, layout, layers, tokens, hardware, efficiency)
    if layout.tp_comm_overlap:  # a layer's collectives overlap with the products beside them
        collective_s = max(collective_s - products_s, 0.0)
    ring_s = num_layers * _ring_s(spec, layout, tokens, hardware, efficiency)

    num_micro_batches = max(tokens * sizes.cp / layout.max_tokens, 1.0)
    parameters = sum(num_parameters(spec, sizes, stage))
    trained = num_trained_parameters(spec, sizes, stage, layout.lora)
    weights_s = _weights_s(parameters, WIDTH, hardware, efficiency) * num_micro_batches
    score_s = layers_s + head_s + collective_s + ring_s + weights_s
    score_s *= 1 + (sizes.pp - 1) / (sizes.vpp or 1) / num_micro_batches

    # backward: twice the products and the traffic; with sequence parallelism inputs are gathered
    # once more
    passes = TRAINING_PASSES + layout.recompute
    tensor_s = collective_s * (2.0 + layout.recompute + (0.5 if layout.sequence_parallel else 0.0))
    # backward: keys and values, and their gradients
    tensor_s += ring_s * (TRAINING_PASSES + layout.recompute)
    weights_s += _weights_s(parameters, WIDTH, hardware, efficiency) * num_micro_batches
    weights_s += _weights_s(sum(trained), 2 * GRADIENT, hardware, efficiency) * num_micro_batches
    worked_s = passes * layers_s + TRAINING_PASSES * head_s + tensor_s + weights_s
    if layout.lora is not None:  # frozen weights have no gradients
        worked_s -= products_s + head_s
    per_step = max(num_micro_batches / work.mini_batches, 1.0)  # micro-batches of an optimizer step
    micro_batch_s = worked_s / (per_step * work.mini_batches)
    bubble_s = micro_batch_s * (sizes.pp - 1) / (sizes.vpp or 1) * work.mini_batches
    optimizer_s = _optimizer_s(trained, layout, work, micro_batch_s, hardware, efficiency)
    update_s = (worked_s + bubble_s) * work.epochs + optimizer_s
    model_flops = work.training_flops(spec, layout.lora) * work.epochs
    return TrainingTime(
        update=update_s,
        tensor=tensor_s * work.epochs,
        bubble=bubble_s * work.epochs,
        optimizer=optimizer_s,
        score=score_s,
        mfu=model_flops / (update_s * sizes.world * hardware.flops),
    )


def _full_micro_batches(tokens: float, mini_batches: int, max_tokens: int) -> int:
    """Return the least number of micro-batches for a data-parallel rank's tokens.

    Each mini-batch has its own.
    """
    return mini_batches * max(math.ceil(tokens / mini_batches / max_tokens), 1)


def _traffic_s(
    spec: ModelSpec,
    layout: TrainerLayout,
    layers: Sequence[int],
    tokens: float,
    hardware: Hardware,
    efficiency: Efficiency,
) -> float:
    """Return the seconds of a layer's activation traffic in a forward pass, the mean over these
    layers. Values that backward needs (arXiv 2205.05198, section 4) are written once, and read once
    by the next operation."""
    part = layout.sizes.tp if layout.sequence_parallel else 1
    num_bytes = 2 * kept_per_token(spec, layout.sizes, WIDTH, part, layers).total
    return tokens * num_bytes / (hardware.memory_bandwidth * efficiency.memory)


def _weights_s(parameters: int, bytes_each: int, hardware: Hardware, efficiency: Efficiency) -> float:
    """Return a micro-batch's seconds to read a rank's weights, or to read and write gradients."""
    return parameters * bytes_each / (hardware.memory_bandwidth * efficiency.memory)


def _collectives_s(
    spec: ModelSpec,
    layout: TrainerLayout,
    layers: Sequence[int],
    tokens: float,
    hardware: Hardware,
    efficiency: Efficiency,
) -> float:
    """Return the seconds of the collectives of these layers, numbered from 0, in a forward pass.

    - Tensor parallel ranks: two all-reduces, or with sequence parallelism two all-gathers and two
      reduce-scatters at the same cost: 4 x (TP - 1) / TP x hidden x 2 bytes per token and rank
      (arXiv 2205.05198, section 4.2.2).
    - Expert parallel ranks: each token goes to its experts and back (two all-to-alls).
    - Expert tensor parallel ranks: each takes the tokens of the others, and returns its part of the
      experts' results.
    """
    sizes = layout.sizes
    wide = spec.hidden_size * WIDTH
    tensor = 4 * (sizes.tp - 1) / sizes.tp * wide / _bandwidth(sizes.tp, layout, hardware)
    experts = 0.0
    if spec.moe:
        copies = spec.moe.experts_per_token * wide / (sizes.tp if layout.sequence_parallel else 1)
        sent = copies * (sizes.ep - 1) / sizes.ep
        experts += 2 * sent / _bandwidth(sizes.ep * sizes.etp, layout, hardware)
        experts += 2 * copies * (sizes.etp - 1) / _bandwidth(sizes.etp, layout, hardware)
    num_moe = sum(map(spec.has_experts, layers))
    return tokens * (len(layers) * tensor + num_moe * experts) / efficiency.link


def _ring_s(spec: ModelSpec, layout: TrainerLayout, tokens: float, hardware: Hardware, efficiency: Efficiency) -> float:
    """Return the seconds of a layer's keys and values round the context-parallel ranks.

    They go round the other ranks in a forward pass (arXiv 2310.01889). In backward they go round
    again, beside their gradients (TE 2.20, attention/dot_product_attention/context_parallel.py).
    Their overlap with attention is left out.
    """
    sizes = layout.sizes
    ring = 2 * spec.num_kv_heads * spec.head_dim * WIDTH / sizes.tp * (sizes.cp - 1)
    bandwidth = _bandwidth(sizes.tp * sizes.cp, layout, hardware) * efficiency.link
    return tokens * ring / bandwidth


def _optimizer_s(
    parameters: tuple[int, int],
    layout: TrainerLayout,
    work: TrainingWork,
    micro_batch_s: float,
    hardware: Hardware,
    efficiency: Efficiency,
) -> float:
    """Return the seconds of all optimizer steps of a rollout step.

    With `overlap_param_gather` the weights of all steps but the last are gathered behind a forward
    pass; the servers wait for the last. parameters: as in `optimizer_step_s`. micro_batch_s:
    forward and backward of one, a third and two thirds of it.
    """
    forward_s, backward_s = micro_batch_s / 3, micro_batch_s * 2 / 3
    last_s = optimizer_step_s(parameters, layout, backward_s, hardware, efficiency)
    gather_s = _exchange_s(parameters, WIDTH, layout, hardware, efficiency)
    hidden_s = min(forward_s, gather_s) if layout.overlap_param_gather else 0.0
    num_steps = work.mini_batches * work.epochs
    return last_s * num_steps - hidden_s * (num_steps - 1)


def optimizer_step_s(
    parameters: tuple[int, int], layout: TrainerLayout, backward_s: float, hardware: Hardware, efficiency: Efficiency
) -> float:
    """Return the seconds from an optimizer step's last backward pass to the next forward pass.

    With the distributed optimizer gradients are reduced and scattered in float32, and weights
    gathered in bfloat16. That takes (N - 1) / N x (4 + 2) bytes per parameter of the rank (arXiv
    1910.02054, section 7). N = DP x CP; for experts it is the number of ranks with the same ones.
    In between, Adam goes over its share and the offloaded part at the same time (`_adam_s`).

    Args:
        parameters: of a rank, shared ones and those of experts.
        backward_s: of one micro-batch; it hides the gradients' part with `overlap_grad_reduce`.
    """
    gradients_s = _exchange_s(parameters, GRADIENT, layout, hardware, efficiency)
    if layout.overlap_grad_reduce:
        gradients_s = max(0.0, gradients_s - backward_s)
    stepped = sum(number / copies for number, copies in _with_copies(parameters, layout.sizes))
    adam_s = _adam_s(stepped, layout.offloaded, hardware, efficiency)
    return gradients_s + adam_s + _exchange_s(parameters, WIDTH, layout, hardware, efficiency)


def _with_copies(parameters: tuple[int, int], sizes: ParallelSizes) -> list[tuple[int, int]]:
    """Return shared parameters, and those of experts, each with the number of ranks that hold the
    same."""
    return list(zip(parameters, (sizes.num_copies, sizes.expert_dp), strict=True))


def _adam_s(parameters: float, offloaded: float, hardware: Hardware, efficiency: Efficiency) -> float:
    """Return the seconds of Adam over a rank's parameters.

    The GPU steps its share while the node's cores step the offloaded one. Meanwhile gradients come,
    and weights go, tensor by tensor (megatron-core 0.16.1,
    optimizer/cpu_offloading/hybrid_optimizer.py: two streams). The slowest counts.
    """
    on_gpu_s = (1 - offloaded) * parameters * ADAM_TRAFFIC / (hardware.memory_bandwidth * efficiency.memory)
    on_host_s = offloaded * parameters * OFFLOADED_TRAFFIC / (hardware.host_memory_bandwidth * efficiency.memory)
    moved_s = offloaded * parameters * GRADIENT / (hardware.host_link_bandwidth * efficiency.link)
    return max(on_gpu_s, on_host_s, moved_s)


def _exchange_s(
    parameters: tuple[int, int], width: int, layout: TrainerLayout, hardware: Hardware, efficiency: Efficiency
) -> float:
    """Return the seconds of an exchange of `width` bytes per parameter.

    The ranks that share the optimizer's state reduce and scatter gradients, or gather weights.
    """
    sizes = layout.sizes
    bandwidth = _bandwidth(sizes.tp * sizes.num_copies, layout, hardware) * efficiency.link
    sent = sum((copies - 1) / copies * number for number, copies in _with_copies(parameters, sizes))
    return sent * width / bandwidth


def _bandwidth(num_adjacent: int, layout: TrainerLayout, hardware: Hardware) -> float:
    """Return the bytes per second between so many adjacent ranks: NVLink within a node."""
    return hardware.link_bandwidth if num_adjacent <= layout.gpus_per_node else hardware.network_bandwidth
