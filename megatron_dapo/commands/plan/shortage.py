"""Reports a shortage of GPU memory, with the cure."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dapo.commands.plan.fitting import (
    SERVER,
    SERVER_TP,
    all_server_sizes,
    changed_overrides,
    in_gb,
    least_server_memory,
    node_counts,
    server_keys,
    server_sizes,
    smallest_server,
    smallest_trainer,
)
from megatron_dapo.common.sizes import GB, ceil_div
from megatron_dapo.config.derived import gpus_per_server_node, servers_per_node, shares_gpus, starts_servers
from megatron_dapo.config.key_names import LORA_RANK, MEGATRON, ROLLOUT
from megatron_dapo.config.keys import show_text, value_of, with_keys
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.hardware import HARDWARE, serves_fp8
from megatron_dapo.estimates.memory import (
    kept_by_trainer,
    kept_free,
    trainer_memory,
    usable_memory,
    weight_sync_bytes,
)
from megatron_dapo.estimates.server_memory import kept_while_sampling, push_memory, server_memory, server_share
from megatron_dapo.estimates.server_weights import holds_blocks
from megatron_dapo.huggingface.model_spec import ModelSpec

OFFLOAD = f"{MEGATRON}.optimizer_offload_fraction"
ADAPTER_RANK = 32
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
    missing = parts.total - usable_memory(config, actor)
    if missing > 0:
        largest, size = next(iter(parts.by_name.items()))
        sentences.append(
            f"A trainer GPU would need about {parts.total / GB:.0f} GB, {size / GB:.0f} of them for {largest}, above "
            f"{_available(config, actor)}; {_cure(largest, config, actor, critic, missing)}."
        )
    if starts_servers(config):
        server = server_memory(config, actor, critic)
        longest = config.data.max_prompt_length + config.data.max_response_length
        if not server.holds(longest):
            states = " and for no request's states" if server.num_requests == 0 else ""
            sentences.append(
                f"A server GPU would have {server.weights / GB:.1f} GB of weights and room for {server.num_tokens} "
                f"tokens{states}, too few for the {longest} of one prompt with its response (trainer.gpu_memory_gb "
                f"{available:g}); {_larger_server(config, actor, critic)}."
            )
        sentences += _beyond_its_nodes(config)
    if shares_gpus(config):
        sentences += _in_turns(config, actor, critic)
    return sentences


def _available(config: Config, actor: ModelSpec) -> str:
    whole = f"trainer.gpu_memory_gb {config.trainer.gpu_memory_gb:g}"
    if not (reserve := kept_free(config, actor)):
        return whole
    its_users = "for both users of a shared GPU" if shares_gpus(config) else "(trainer.gpu_reserve_gb)"
    free = usable_memory(config, actor) / GB
    return f"the {free:.4g} GB that {whole} has beside {reserve / GB:g} GB kept free {its_users}"


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
    if shares_gpus(config):
        return _same_gpus(config, spec, critic)
    cure = _layout(config, spec, critic)
    may_raise = part == "optimizer" and takes_offload(spec)
    return f"{cure}, or raise {_ACTOR}.megatron.optimizer_offload_fraction" if may_raise else cure


def takes_offload(spec: ModelSpec) -> bool:
    """Return whether Adam may step on the host: Megatron's takes no float32 weights, as the decays
    of a delta net."""
    return spec.delta_net is None


def _layout(config: Config, actor: ModelSpec, critic: ModelSpec | None) -> str:
    keys = smallest_trainer(config, actor, critic, node_counts(config.trainer.nnodes))
    if keys is None:
        return "no layout on 256 nodes or fewer fits; use GPUs of more memory, or train adapters (docs/lora.md)"
    return _fitting(config, keys)


def _fitting(config: Config, keys: Mapping[str, Any]) -> str:
    return f"these fit by the estimate: {' '.join(changed_overrides(config, keys))}"


def _same_gpus(config: Config, actor: ModelSpec, critic: ModelSpec | None) -> str:
    """Return the cure on the GPUs that the trainer shares: another layout, Adam on the host, or
    adapters."""
    tried: list[dict[str, Any]] = [{}, {OFFLOAD: 1.0}, {LORA_RANK: ADAPTER_RANK}]
    for keys in tried if takes_offload(actor) else [tried[0], tried[-1]]:
        layout = smallest_trainer(with_keys(config, keys), actor, critic, [config.trainer.nnodes])
        if layout is not None and (LORA_RANK not in keys or critic is None):
            return _fitting(config, {**keys, **layout})
    return "not even adapters (docs/lora.md) fit on these GPUs; use more of them, or larger ones"


def _in_turns(config: Config, actor: ModelSpec, critic: ModelSpec | None) -> Iterator[str]:
    """Yield mistakes about moments when both users of a shared GPU have memory."""
    size = config.trainer.gpu_memory_gb * GB
    kept, share = kept_while_sampling(config, actor, critic), server_share(config, actor, critic)
    if kept + share * size > size:
        yield (
            f"{ROLLOUT}.server.mem_fraction_static {share:g} is {share * size / GB:.0f} GB of a GPU, beside "
            f"{kept / GB:.0f} GB that the trainer keeps while servers sample, together above trainer.gpu_memory_gb "
            f"{size / GB:g}; leave mem_fraction_static null."
        )
    if (pushing := push_memory(config, actor, critic)) > size:
        sizes = {tp: with_keys(config, {SERVER_TP: tp}) for tp in server_sizes(config, actor)}
        tp = next((tp for tp, changed in sizes.items() if push_memory(changed, actor, critic) <= size), None)
        cure = (
            _set(config, server_keys(config, tp, 1))
            if tp
            else f"raise {MEGATRON}.tensor_model_parallel_size, or lower weight_sync.bucket_size_mb"
        )
        yield (
            f"A push would need about {pushing / GB:.0f} GB of a shared GPU, with the weights of trainer and server, "
            f"above trainer.gpu_memory_gb {size / GB:g}; {cure}."
        )


def _larger_server(config: Config, spec: ModelSpec, critic: ModelSpec | None) -> str:
    server, gpus = config.actor_rollout_ref.rollout.server, config.trainer.n_procs_per_node
    if shares_gpus(config) and kept_while_sampling(config, spec, critic) > kept_by_trainer(config, spec):
        return f"set {MEGATRON}.param_offload and optimizer_offload to true: the trainer's memory is beside it"
    if (smallest := smallest_server(config, spec)) is not None:
        return _set(config, server_keys(config, *smallest))
    needed = least_server_memory(config, spec)
    can_serve = serves_fp8 if holds_blocks(config) else lambda capability: capability > (0, 0)
    enough = [name for name, gpu in HARDWARE.items() if gpu.memory >= needed and can_serve(gpu.capability)]
    names = f", such as {enough[0]}" if enough else ", which none of `plan --hardware` has: serve a smaller model"
    most = max((nodes for _, nodes in all_server_sizes(config, spec)), default=1)
    where = f"on {most} nodes of {gpus} GPUs" if most > 1 else f"on the {gpus} GPUs of one node"
    why = "" if server.nnodes else f"without nodes of their own ({SERVER}.nnodes) servers do not span nodes, and "
    return f"{why}{where} this model needs GPUs of {in_gb(needed)} GB{names}"


def _beyond_its_nodes(config: Config) -> list[str]:
    """Return a mistake if a node's servers need more GPUs than it has. Servers of one process each
    may be on CPUs, in any number."""
    server, gpus = config.actor_rollout_ref.rollout.server, config.trainer.n_procs_per_node
    tp, number = server.tensor_model_parallel_size, servers_per_node(config)
    if not server.nnodes or tp == 1 or number * gpus_per_server_node(config) <= gpus:
        return []
    over = server.nodes_per_server
    least = next(nodes for nodes in range(max(over, ceil_div(tp, gpus)), tp + 1) if tp % nodes == 0)
    cure = _set(config, server_keys(config, tp, least))
    less = f"set it to {over * gpus} or less, or " if tp > over * gpus else ""
    return [
        f"{SERVER_TP} is {tp}{f' over {over} nodes' if over > 1 else ''}, and each node has {number} "
        f"{'server' if number == 1 else 'servers'}, but {gpus} GPUs (trainer.n_procs_per_node); {less}{cure}."
    ]


def _set(config: Config, keys: Mapping[str, Any]) -> str:
    """Return the keys with other values than a config's, in words."""
    words = [f"{key} to {show_text(value)}" for key, value in keys.items() if value_of(config, key) != value]
    return "set " + " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
