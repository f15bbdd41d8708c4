"""The speed of a server's decoding, and the time of a push of the weights, by a roofline.

Decoding reads the weights once per token of all requests, and each request's keys and values: it is
bound by memory. So a token of each of r requests takes token_s + r x token_s_per_request, the
simulation's input.
"""

from dataclasses import dataclass

from megatron_dapo.commands.plan.training_time import WIDTH, Efficiency
from megatron_dapo.common.sizes import MIB, ceil_div
from megatron_dapo.config.derived import has_given_servers, shares_gpus, world_size
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.estimates.hardware import FP8_SPEED, Hardware, serves_fp8
from megatron_dapo.estimates.memory import num_all_parameters, num_expert_parameters
from megatron_dapo.estimates.server_memory import cache_width
from megatron_dapo.estimates.server_weights import weight_bytes
from megatron_dapo.huggingface.model_spec import ModelSpec

# Seconds of a small all-reduce inside a node, two per layer and token: 10 to 20 us by SGLang's and
# vLLM's own kernels on 4 to 8 GPUs.
ALL_REDUCE_S = 15e-6
# The same over nodes, by NCCL: 61 to 75 us for 128 bytes to 4 KB on two nodes of 8 H100
# (github.com/NVIDIA/nccl, issue 1453).
ALL_REDUCE_OVER_NODES_S = 65e-6
# Seconds per bucket until the server has loaded it and answered, besides its broadcast: a real
# server's on a CPU (docs/weight_sync.md, "How fast it is").
BUCKET_S = 5e-3


@dataclass(frozen=True)
class ServerSpeed:
    """A server with r requests in flight writes one token of each in token_s + r *
    token_s_per_request seconds."""

    token_s: float
    token_s_per_request: float
    slots: int
    """Requests decoded at once."""
    prefill_s: float
    """Per token of a prompt, or of a response prefilled again."""

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of a server with all slots in use."""
        return self.slots / (self.token_s + self.slots * self.token_s_per_request)

    def scaled_to(self, tokens_per_s: float) -> "ServerSpeed":
        """Return a server with this speed at all its slots, and the same shape below."""
        factor = self.tokens_per_s / tokens_per_s
        return ServerSpeed(self.token_s * factor, self.token_s_per_request * factor, self.slots, self.prefill_s)


@dataclass(frozen=True)
class ServerLayout:
    """A server's GPUs, and what they hold."""

    tp: int
    slots: int
    """Requests at once, at most."""
    nodes: int = 1
    in_blocks: bool = False
    """Whether its weights are FP8 blocks."""
    state: int = 0
    """Bytes of a request's states of delta nets."""


def mean_context(responses: Lengths, prompt: int) -> float:
    """Return the tokens that a running request has in the cache, the mean over running requests and
    time: the prompt, and E[L^2] / 2 E[L], since long responses run longer."""
    return prompt + responses.mean_square / (2 * responses.mean)


def server_speed(
    spec: ModelSpec,
    layout: ServerLayout,
    responses: Lengths,
    prompt: int,
    hardware: Hardware,
    efficiency: Efficiency,
) -> ServerSpeed:
    """Return the speed of a server.

    Per token of all requests: the weights from memory, two all-reduces per layer, and the host. The
    weights are those of all experts, since some dozen requests use each one.

    Per request: its keys and values from memory, its states of delta nets from and to memory, two
    operations per parameter, its part of the all-reduces, and the host's work. Keys and values are
    2 x layers x KV heads x dim numbers per token of its context (arXiv 2309.06180, section 3). The
    host's time to read and answer the request is spread over its tokens. Over several nodes
    all-reduces go at the network's speed.
    """
    tp = layout.tp
    memory = hardware.memory_bandwidth * efficiency.memory
    weights = weight_bytes(spec, WIDTH, tp, in_blocks=layout.in_blocks)
    kv_per_token = spec.num_attention_layers * cache_width(spec, tp) * WIDTH
    latency, bandwidth = ALL_REDUCE_S, hardware.link_bandwidth
    if layout.nodes > 1:
        latency, bandwidth = ALL_REDUCE_OVER_NODES_S, hardware.network_bandwidth
    reduced = 2 * spec.num_layers * 2 * (tp - 1) / tp * spec.hidden_size * WIDTH
    multiplied_s = _operations(spec, layout, hardware) / (hardware.flops * efficiency.matmul * tp)
    context = mean_context(responses, prompt)
    if spec.windows is not None:  # of layers with a window no more is read
        share = spec.num_local_layers / spec.num_layers
        context = (1 - share) * context + share * min(context, spec.windows.size)
    return ServerSpeed(
        token_s=weights / memory + (2 * spec.num_layers * latency if tp > 1 else 0.0) + hardware.host_token_s,
        token_s_per_request=(kv_per_token * context + 2 * layout.state / tp) / memory
        + multiplied_s
        + reduced / (bandwidth * efficiency.link)
        + hardware.host_request_token_s
        + hardware.host_request_s / responses.mean,
        slots=layout.slots,
        prefill_s=multiplied_s,
    )


def _operations(spec: ModelSpec, layout: ServerLayout, hardware: Hardware) -> float:
    """Return a token's operations, in those of bfloat16: FP8 ones count by their speed, all but the
    head's."""
    head = spec.vocab_size * spec.hidden_size
    is_faster = layout.in_blocks and serves_fp8(hardware.capability)
    return 2 * ((active_parameters(spec) - head) / (FP8_SPEED if is_faster else 1) + head)


def active_parameters(spec: ModelSpec) -> int:
    """Return the parameters in a token's products.

    The embedding's rows, only looked up, and unused experts do not count.
    """
    unused = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    if spec.moe:
        idle = spec.moe.num_experts - spec.moe.experts_per_token
        unused += spec.num_moe_layers * num_expert_parameters(spec) * idle
    return num_all_parameters(spec) - unused


def push_rate(config: Config, hardware: Hardware, efficiency: Efficiency) -> float:
    """Return the bytes per second of a push (a broadcast passes each byte once): over the sender's
    adapter, within one node over its links, on one shared GPU read and written in its memory."""
    if shares_gpus(config) and world_size(config) == 1:
        return hardware.memory_bandwidth * efficiency.memory / 2
    in_one_node = config.trainer.nnodes == 1 and not config.actor_rollout_ref.rollout.server.nnodes
    is_near = in_one_node and not has_given_servers(config)
    return (hardware.link_bandwidth if is_near else hardware.network_bandwidth) * efficiency.link


def push_s(spec: ModelSpec, bucket_mb: int, rate: float, *, in_blocks: bool = False) -> float:
    """Return the seconds of a push at so many bytes per second.

    The weights go in bfloat16, or in FP8 blocks. For each bucket the answers of the servers are
    added.
    """
    num_bytes = weight_bytes(spec, WIDTH, in_blocks=in_blocks)
    return num_bytes / rate + ceil_div(num_bytes, bucket_mb * MIB) * BUCKET_S
