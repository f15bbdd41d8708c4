"""Reports a shortage of GPU memory, with the cure."""

from megatron_dapo.commands.plan.fitting import (
    SERVER_TP,
    in_gb,
    least_server_memory,
    node_counts,
    smallest_server,
    smallest_trainer,
)
from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import servers_per_node, starts_servers
from megatron_dapo.config.key_names import ROLLOUT
from megatron_dapo.config.keys import show_text, value_of
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.memory import kept_free, server_memory, trainer_memory, usable_memory, weight_sync_bytes
from megatron_dapo.huggingface.model_spec import ModelSpec

_ACTOR = "actor_rollout_ref.actor"
CURES = {  # of other parts: a layout
    "activations": f"set {_ACTOR}.megatron.recompute_granularity=auto, or lower {_ACTOR}.max_tokens_per_microbatch",
    "log prob head": f"lower {_ACTOR}.log_prob_chunk_size, or (not fused) {_ACTOR}.max_tokens_per_microbatch",
    "weight sync": "lower weight_sync.bucket_size_mb",
    "routed experts": f"lower {_ACTOR}.max_tokens_per_microbatch, or set {_ACTOR}.router_replay to off",
    "user buffers": f"set {_ACTOR}.megatron.tp_comm_overlap to false, or lower {_ACTOR}.max_tokens_per_microbatch",
}


def shortage(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> list[str]:
    """Return a sentence with the cure for each kind of GPU that the estimate does not fit into."""
    sentences: list[str] = []
    available = config.trainer.gpu_memory_gb
    parts = trainer_memory(config, actor, critic)
    missing = parts.total - usable_memory(config)
    if missing > 0:
        largest, size = next(iter(parts.by_name.items()))
        sentences.append(
            f"A trainer GPU would need about {parts.total / GB:.0f} GB, {size / GB:.0f} of them for {largest}, above "
            f"{_available(config)}; {_cure(largest, config, actor, critic, missing)}."
        )
    if starts_servers(config):
        server = server_memory(config, actor)
        longest = config.data.max_prompt_length + config.data.max_response_length
        if server.num_tokens < longest:
            sentences.append(
                f"A server GPU would have {server.weights / GB:.1f} GB of weights and room for {server.num_tokens} "
                f"tokens, fewer than the {longest} of one prompt with its response (trainer.gpu_memory_gb "
                f"{available:g}); {_larger_server(config, actor)}."
            )
        sentences += _beyond_a_node(config)
    return sentences


def _available(config: Config) -> str:
    whole = f"trainer.gpu_memory_gb {config.trainer.gpu_memory_gb:g}"
    if not (reserve := kept_free(config)):
        return whole
    return (
        f"the {usable_memory(config) / GB:.4g} GB that {whole} has beside {reserve / GB:g} GB kept free "
        f"(trainer.gpu_reserve_gb)"
    )


def _cure(part: str, config: Config, spec: ModelSpec, critic: ModelSpec | None, missing: float) -> str:
    """Return the cure for a trainer GPU's largest part.

    missing: excess of the estimate, in bytes.
    """
    if part == "weight sync":
        smallest = config.weight_sync.model_copy(update={"bucket_size_mb": 1})
        least = weight_sync_bytes(config.model_copy(update={"weight_sync": smallest}), spec)
        if weight_sync_bytes(config, spec) - least < missing:
            return (
                f"tensors are gathered whole, so that smaller buckets do not suffice; {_layout(config, spec, critic)}"
            )
    if part in CURES:
        return CURES[part]
    cure = _layout(config, spec, critic)
    return f"{cure}, or raise {_ACTOR}.megatron.optimizer_offload_fraction" if part == "optimizer" else cure


def _layout(config: Config, actor: ModelSpec, critic: ModelSpec | None) -> str:
    keys = smallest_trainer(config, actor, critic, node_counts(config.trainer.nnodes))
    if keys is None:
        return "no layout on 256 nodes or fewer fits; use GPUs of more memory, or train adapters (docs/lora.md)"
    changed = [f"{key}={show_text(value)}" for key, value in keys.items() if value_of(config, key) != value]
    return f"these fit by the estimate: {' '.join(changed)}"


def _larger_server(config: Config, spec: ModelSpec) -> str:
    server, gpus = config.actor_rollout_ref.rollout.server, config.trainer.n_procs_per_node
    if tp := smallest_server(config, spec):
        has_room = not server.nnodes or servers_per_node(config) * tp <= gpus
        return f"set {SERVER_TP} to {tp}" + ("" if has_room else f", and {_fewer_servers(config, tp)}")
    needed = least_server_memory(config, spec)
    enough = [name for name, gpu in HARDWARE.items() if gpu.memory >= needed and gpu.capability > (0, 0)]
    names = f", such as {enough[0]}" if enough else ", which none of `plan --hardware` has: serve a smaller model"
    return (
        f"a server does not span nodes, and on the {gpus} GPUs of one this model needs GPUs of {in_gb(needed)} GB"
        f"{names}"
    )


def _beyond_a_node(config: Config) -> list[str]:
    """Return a mistake if a node's servers need more GPUs than it has. Servers of one process each
    may be on CPUs, in any number."""
    server = config.actor_rollout_ref.rollout.server
    tp, number, gpus = server.tensor_model_parallel_size, servers_per_node(config), config.trainer.n_procs_per_node
    if not server.nnodes or tp == 1 or number * tp <= gpus:
        return []
    cure = f"set {_fewer_servers(config, tp)}" if tp <= gpus else f"set it to {gpus} or less"
    return [
        f"{SERVER_TP} is {tp}, and each node has {number} {'server' if number == 1 else 'servers'}, but {gpus} GPUs "
        f"(trainer.n_procs_per_node), and a server does not span nodes; {cure}."
    ]


def _fewer_servers(config: Config, tp: int) -> str:
    number = config.actor_rollout_ref.rollout.server.nnodes * max(config.trainer.n_procs_per_node // tp, 1)
    return f"{ROLLOUT}.server.num_servers to {number}"
