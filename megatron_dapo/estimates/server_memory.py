"""GPU memory of servers before their start, and of GPUs that they share with the trainer.

While servers sample on a shared GPU (`hybrid_engine`), weights and optimizer state of its trainer
rank are in the machine's memory (`param_offload`, `optimizer_offload`); gradients are freed, not
copied. While the trainer trains, servers hold neither weights nor cache. The weights are pushed in
between, with those of both sides there.
"""

import math
from dataclasses import dataclass

from megatron_dapo.common.sizes import GB, GIB
from megatron_dapo.config.derived import parallel_sizes, shares_gpus, uses_critic
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.memory import (
    dtype_bytes,
    host_memory,
    kept_by_server,
    kept_by_trainer,
    model_states,
    reference_weights,
    weight_sync_bytes,
)
from megatron_dapo.estimates.server_states import given_states, state_bytes, states_per_request, states_share
from megatron_dapo.estimates.server_weights import holds_blocks, weight_bytes
from megatron_dapo.huggingface.model_spec import ModelSpec

# SGLang's own share of an 80 GB GPU for weights and KV cache: all but 0.5 GB, 1.5 MB per token of a
# chunk of prefill (8192), TP / 8 GB (here of TP 8) and the CUDA graphs (sglang 0.5.23,
# arg_groups/memory_hook.py).
SERVER_SHARE = 0.82
# Bytes per second between a GPU and pinned memory, over PCIe 5.0 x16 (63 GB/s), in one direction.
COPY_RATE = 55 * GB


@dataclass(frozen=True)
class ServerParts:
    """Bytes per GPU of a server."""

    weights: int
    kv_cache: int  # the rest, for all tokens; below 0 if the weights do not fit
    kv_per_token: int  # of one token in its cache
    states: int = 0  # of delta nets
    state: int = 0  # one of them; 0 without delta nets
    states_per_request: int = 1

    @property
    def num_tokens(self) -> int:
        return max(0, self.kv_cache // self.kv_per_token)

    @property
    def num_requests(self) -> int | None:
        """Return the requests at once by the states; None without delta nets."""
        return max(0, self.states // self.state // self.states_per_request) if self.state else None

    def holds(self, num_tokens: int) -> bool:
        """Return whether a request of so many tokens fits."""
        return self.num_tokens >= num_tokens and self.num_requests != 0

    def least_cache(self, config: Config, num_tokens: int) -> float:
        """Return the bytes of a cache for a request of so many tokens and its states."""
        keys, states = num_tokens * self.kv_per_token, self.state * self.states_per_request
        if not self.state:
            return keys
        if given_states(config) is not None:
            return keys + self.states
        share = states_share(config)
        return max(keys / (1 - share), states / share)


def server_memory(config: Config, spec: ModelSpec, critic: ModelSpec | None = None) -> ServerParts:
    """Return a GPU's share of a server's weights, its key-value cache, and states of
    delta nets. critic: the spec of a critic of another size, which may be kept on a shared GPU."""
    server = config.actor_rollout_ref.rollout.server
    width = dtype_bytes(config)
    tp = server.tensor_model_parallel_size
    weights = weight_bytes(spec, width, tp, in_blocks=holds_blocks(config))
    per_token = spec.num_attention_layers * cache_width(spec, tp) * width
    left = int(server_share(config, spec, critic) * config.trainer.gpu_memory_gb * GB) - weights
    state, number = state_bytes(config, spec) // tp, given_states(config)
    states = 0
    if state:
        states = round(left * states_share(config)) if number is None else number * state
    left -= states
    if server.max_total_tokens is not None:
        left = min(left, server.max_total_tokens * per_token)
    return ServerParts(weights, left, per_token, states, state, states_per_request(config))


def cache_width(spec: ModelSpec, tp: int) -> int:
    """Return the numbers per token and layer with attention on a server's GPU: 2 x KV heads (at least one) x dim
    (arXiv 2309.06180, section 3). Latent attention has the vector and the rotated key, whole on
    each GPU (arXiv 2405.04434, section 2.1.3)."""
    if spec.latent is not None:
        return spec.latent.kv_rank + spec.latent.rotary_dim
    return 2 * max(1, spec.num_kv_heads // tp) * spec.head_dim


def server_share(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> float:
    """Return the share of a GPU for a server's weights and cache: the config's, else SGLang's own,
    on a shared GPU without the bytes that the trainer keeps there."""
    if (share := config.actor_rollout_ref.rollout.server.mem_fraction_static) is not None:
        return share
    if not shares_gpus(config):
        beyond = max(config.actor_rollout_ref.rollout.server.tensor_model_parallel_size / 8 - 1, 0) * GIB
        return SERVER_SHARE - beyond / (config.trainer.gpu_memory_gb * GB)
    kept = kept_while_sampling(config, actor, critic) / (config.trainer.gpu_memory_gb * GB)
    return max(math.floor((SERVER_SHARE - kept) * 100), 1) / 100


def _states(config: Config, actor: ModelSpec, critic: ModelSpec | None, *, weights: bool, optimizer: bool) -> int:
    """Return the bytes of the fullest rank's weights, optimizer state or both, of actor, critic and
    reference."""
    specs = [actor, (critic or actor).as_critic()] if uses_critic(config) else [actor]

    def of_stage(stage: int) -> int:
        models = [model_states(config, spec, stage) for spec in specs]
        total = sum(weights * model.weights + optimizer * model.optimizer for model in models)
        return total + weights * reference_weights(config, actor, stage)

    return max(of_stage(stage) for stage in range(parallel_sizes(config).pp))


def moved_bytes(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> int:
    """Return the bytes that the fullest rank moves to the machine's memory, and back, in a step."""
    keys = config.actor_rollout_ref.actor.megatron
    return _states(config, actor, critic, weights=keys.param_offload, optimizer=keys.optimizer_offload)


def moving_s(config: Config, num_bytes: float, rate: float = COPY_RATE) -> float:
    """Return the seconds to move so many bytes of each GPU in one direction. Several GPUs of a node
    share its memory: twice as long."""
    return num_bytes / rate * (1 if config.trainer.n_procs_per_node == 1 else 2)


def parked_on_host(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> int:
    """Return the bytes of a node's memory for what its ranks park there, and for an optimizer that
    is stepped there. All ranks count as the fullest."""
    pinned = moved_bytes(config, actor, critic) * config.trainer.n_procs_per_node
    return pinned + host_memory(config, actor, critic)


def kept_while_sampling(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> float:
    """Return the bytes of the fullest rank on its GPU while servers sample."""
    keys = config.actor_rollout_ref.actor.megatron
    left = _states(config, actor, critic, weights=not keys.param_offload, optimizer=not keys.optimizer_offload)
    return kept_by_trainer(config, actor) + left


def push_memory(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> float:
    """Return the bytes of a shared GPU during a push: weights of both sides, buckets, and what each
    side always keeps."""
    is_kept = not config.actor_rollout_ref.actor.megatron.optimizer_offload
    states = _states(config, actor, critic, weights=True, optimizer=is_kept)
    trainer = kept_by_trainer(config, actor) + states + weight_sync_bytes(config, actor)
    return trainer + server_memory(config, actor, critic).weights + kept_by_server(config)
