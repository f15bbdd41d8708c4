"""Memory that changes hands on shared GPUs (`hybrid_engine`), and what stays where.

While servers sample, a trainer rank's weights and optimizer state are in the machine's memory
(`param_offload`, `optimizer_offload`); gradients are freed, not copied. While the trainer trains,
servers hold neither weights nor cache. The weights are pushed in between, with those of both sides
there.
"""

import math
from dataclasses import dataclass

from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import parallel_sizes, shares_gpus, uses_critic
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.memory import host_memory, kept_by_trainer, model_states, reference_weights
from megatron_dapo.huggingface.model_spec import ModelSpec

# SGLang's own share of an 80 GB GPU for weights and KV cache: all but 0.5 GB, 1.5 MB per token of a
# chunk of prefill (8192), TP / 8 GB and the CUDA graphs (sglang 0.5.23, arg_groups/memory_hook.py).
SERVER_SHARE = 0.82
# Bytes per second between a GPU and pinned memory, over PCIe 5.0 x16 (63 GB/s), in one direction.
COPY_RATE = 55 * GB
LEAST_SHARE = 0.01


@dataclass(frozen=True)
class _States:
    """Bytes of a trainer rank that can leave its GPU: of actor, critic and reference."""

    weights: int
    optimizer: int


def _stages(config: Config, actor: ModelSpec, critic: ModelSpec | None) -> list[_States]:
    """Return the states of each pipeline stage."""
    specs = [actor, (critic or actor).as_critic()] if uses_critic(config) else [actor]

    def of_stage(stage: int) -> _States:
        models = [model_states(config, spec, stage) for spec in specs]
        weights = sum(model.weights for model in models) + reference_weights(config, actor, stage)
        return _States(weights, sum(model.optimizer for model in models))

    return [of_stage(stage) for stage in range(parallel_sizes(config).pp)]


def moved_bytes(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> int:
    """Return the bytes that the fullest rank moves to the machine's memory, and back, in a step."""
    keys = config.actor_rollout_ref.actor.megatron
    stages = _stages(config, actor, critic)
    return max(keys.param_offload * stage.weights + keys.optimizer_offload * stage.optimizer for stage in stages)


def kept_while_sampling(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> float:
    """Return the bytes of the fullest rank on its GPU while servers sample."""
    keys = config.actor_rollout_ref.actor.megatron
    weights, optimizer = not keys.param_offload, not keys.optimizer_offload
    stages = _stages(config, actor, critic)
    kept = max(weights * stage.weights + optimizer * stage.optimizer for stage in stages)
    return kept_by_trainer(config, actor) + kept


def kept_while_pushing(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> float:
    """Return the bytes of the fullest rank on its GPU during a push, without buckets."""
    optimizer = not config.actor_rollout_ref.actor.megatron.optimizer_offload
    kept = max(stage.weights + optimizer * stage.optimizer for stage in _stages(config, actor, critic))
    return kept_by_trainer(config, actor) + kept


def moving_s(config: Config, num_bytes: float, rate: float = COPY_RATE) -> float:
    """Return the seconds to move so many bytes of each GPU in one direction. Several GPUs of a node
    share its memory: twice as long."""
    return num_bytes / rate * (1 if config.trainer.n_procs_per_node == 1 else 2)


def pinned_memory(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> float:
    """Return the bytes of a node's memory for what its ranks park there. All of them count as ranks
    of the fullest stage."""
    return moved_bytes(config, actor, critic) * config.trainer.n_procs_per_node


def parked_on_host(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> float:
    """Return `pinned_memory`, and the state of an optimizer that is stepped on the host."""
    return pinned_memory(config, actor, critic) + host_memory(config, actor, critic)


def server_share(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> float:
    """Return the share of a GPU for a server's weights and cache: the config's, else SGLang's own,
    on a shared GPU without the bytes that the trainer keeps there."""
    if (share := config.actor_rollout_ref.rollout.server.mem_fraction_static) is not None:
        return share
    if not shares_gpus(config):
        return SERVER_SHARE
    kept = kept_while_sampling(config, actor, critic) / (config.trainer.gpu_memory_gb * GB)
    return max(math.floor((SERVER_SHARE - kept) * 100) / 100, LEAST_SHARE)
