"""Servers and layouts of a trainer that fit into the memory of a config's GPUs: for advice that can
be followed."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import critic_batching, parallel_sizes, shares_gpus, uses_critic
from megatron_dapo.config.key_names import MEGATRON, ROLLOUT
from megatron_dapo.config.keys import show_text, value_of, with_keys
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.memory import trainer_memory, usable_memory
from megatron_dapo.estimates.recompute import ALL_LAYERS
from megatron_dapo.estimates.server_memory import server_memory, server_share
from megatron_dapo.estimates.server_weights import fills_blocks, holds_blocks
from megatron_dapo.huggingface.model_spec import ModelSpec

SERVER = f"{ROLLOUT}.server"
SERVER_TP = f"{SERVER}.tensor_model_parallel_size"
NUM_SERVERS, NODES_PER_SERVER = f"{SERVER}.num_servers", f"{SERVER}.nodes_per_server"
OVER_NODES = (1, 2, 4, 8)  # of a server, fewer first
_STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
_MOST_NODES = 256


def server_sizes(config: Config, spec: ModelSpec, nodes: int = 1) -> list[int]:
    """Return the tensor-parallel sizes of a server for SGLang's cut of this model: parts of a node,
    or all GPUs of several."""
    gpus = config.trainer.n_procs_per_node
    sizes = [nodes * gpus] if nodes > 1 else [tp for tp in range(1, gpus + 1) if gpus % tp == 0]
    return [tp for tp in sizes if cuts_server(config, spec, tp)]


def cuts_server(config: Config, spec: ModelSpec, tp: int) -> bool:
    """Return whether SGLang cuts this model for so many GPUs."""
    if spec.num_heads % tp or (spec.moe and (spec.ffn_size % tp or spec.moe.shared_ffn_size % tp)):
        return False
    if spec.delta_net and spec.delta_net.num_key_heads % tp:
        return False
    if holds_blocks(config) and not fills_blocks(config, spec, tp):
        return False
    return not (spec.num_kv_heads % tp and tp % spec.num_kv_heads)


def all_server_sizes(config: Config, spec: ModelSpec) -> list[tuple[int, int]]:
    """Return (tensor-parallel size, nodes) of all servers to choose from, the smallest first.
    Without nodes of their own they are within one."""
    over = OVER_NODES if config.actor_rollout_ref.rollout.server.nnodes else (1,)
    return [(tp, nodes) for nodes in over for tp in server_sizes(config, spec, nodes)]


def smallest_server(config: Config, spec: ModelSpec) -> tuple[int, int] | None:
    """Return (tensor-parallel size, nodes) of the smallest server that holds a sample of full
    length; None if none does."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    fitting = (
        (tp, nodes)
        for tp, nodes in all_server_sizes(config, spec)
        if server_memory(with_keys(config, {SERVER_TP: tp}), spec).holds(longest)
    )
    return next(fitting, None)


def server_keys(config: Config, tp: int, nodes: int) -> dict[str, Any]:
    """Return the keys of servers of this size: as many as now, or as the GPUs of their nodes hold,
    and the same number on each group of nodes. Nodes that make no whole group are given up.

    On one machine they share the GPUs that they have now.
    """
    server, gpus = config.actor_rollout_ref.rollout.server, config.trainer.n_procs_per_node
    num_nodes = config.trainer.nnodes if shares_gpus(config) else server.nnodes
    if not num_nodes:
        num_nodes, gpus = 1, server.num_servers * server.tensor_model_parallel_size
    groups = max(num_nodes // nodes, 1)
    number = groups * max(min(server.num_servers // groups, nodes * gpus // tp), 1)
    keys: dict[str, Any] = {SERVER_TP: tp, NODES_PER_SERVER: nodes, NUM_SERVERS: number}
    return keys | ({f"{SERVER}.nnodes": groups * nodes} if nodes > 1 else {})


def least_server_memory(config: Config, spec: ModelSpec) -> float:
    """Return the bytes that each GPU has to have for the largest server to hold a sample."""
    own = config.actor_rollout_ref.rollout.server.tensor_model_parallel_size
    tp = max((tp for tp, _ in all_server_sizes(config, spec)), default=own)
    largest = with_keys(config, {SERVER_TP: tp})
    server = server_memory(largest, spec)
    longest = config.data.max_prompt_length + config.data.max_response_length
    return (server.weights + server.least_cache(largest, longest)) / server_share(largest, spec)


def node_counts(first: int) -> list[int]:
    """Return numbers of nodes to try: powers of two, and doublings of the first."""
    doubled = [first * 2**i for i in range(_MOST_NODES.bit_length())]
    powers = [2**i for i in range(_MOST_NODES.bit_length())]
    return sorted({number for number in (*doubled, *powers) if first <= number <= _MOST_NODES})


def smallest_trainer(
    config: Config, actor: ModelSpec, critic: ModelSpec | None, nodes: Iterable[int]
) -> dict[str, Any] | None:
    """Return the keys of a layout that fits, with full recomputation, on the first sufficient
    number of nodes.

    Experts stay within a node if they fit; then the ranks per copy of the model are as few as
    possible.
    """
    for number in nodes:
        fitting = []
        for keys in _layouts(config, actor, critic, number):
            changed = with_keys(config, keys)
            if (total := trainer_memory(changed, actor, critic).total) <= usable_memory(changed, actor):
                sizes = parallel_sizes(changed)
                spans_nodes = sizes.ep * sizes.etp > config.trainer.n_procs_per_node
                fitting.append(((spans_nodes, sizes.tp * sizes.pp, total), keys))
        if fitting:
            return min(fitting, key=lambda pair: pair[0])[1]
    return None


def _layouts(config: Config, actor: ModelSpec, critic: ModelSpec | None, nodes: int) -> Iterator[dict[str, Any]]:
    per_node = config.trainer.n_procs_per_node
    sizes = parallel_sizes(config)
    world = nodes * per_node
    num_experts = actor.moe.num_experts if actor.moe else 1
    experts = [2**i for i in range(num_experts.bit_length()) if num_experts % 2**i == 0]
    tensor = [
        tp
        for tp in range(1, per_node + 1)
        if per_node % tp == 0 and all(_cuts(s, tp) for s in (actor, critic or actor))
    ]
    for tp, pp, ep in itertools.product(tensor, _STAGES, experts):
        if world % (tp * pp * sizes.cp) or world // pp % (ep * sizes.etp) or pp > actor.num_layers:
            continue
        if any(samples % (world // (tp * pp * sizes.cp)) for samples in mini_batches(config)):
            continue
        yield {
            "trainer.nnodes": nodes,
            **layout_keys(tp, pp, ep),
            f"{MEGATRON}.use_distributed_optimizer": True,
            **{f"{MEGATRON}.{name}": value for name, value in ALL_LAYERS.items()},
        }


def layout_keys(tp: int, pp: int, ep: int) -> dict[str, Any]:
    """Return the keys of a layout with these sizes, its layers divided evenly."""
    return {
        f"{MEGATRON}.tensor_model_parallel_size": tp,
        f"{MEGATRON}.pipeline_model_parallel_size": pp,
        f"{MEGATRON}.virtual_pipeline_model_parallel_size": None,
        f"{MEGATRON}.pipeline_layers": None,
        f"{MEGATRON}.expert_model_parallel_size": ep,
        f"{MEGATRON}.sequence_parallel": tp > 1,
    }


def changed_overrides(config: Config, keys: Mapping[str, Any]) -> list[str]:
    """Return the keys with other values than a config's, in the form of a command line."""
    return [f"{key}={show_text(value)}" for key, value in keys.items() if value_of(config, key) != value]


def mini_batches(config: Config) -> list[int]:
    """Return the samples of an optimizer step, of the actor and of a critic: data-parallel ranks
    share them evenly."""
    if config.sft.enable:
        return [config.data.train_batch_size]
    groups = [config.actor_rollout_ref.actor.ppo_mini_batch_size]
    groups += [critic_batching(config).ppo_mini_batch_size] if uses_critic(config) else []
    return [number * config.actor_rollout_ref.rollout.n for number in groups]


def _cuts(spec: ModelSpec, tp: int) -> bool:
    """Return whether tensor parallelism divides a model's matrices."""
    widths = [spec.num_heads, spec.num_kv_heads, spec.hidden_size, spec.dense_ffn_size]
    if spec.moe is not None:
        widths.append(spec.moe.shared_ffn_size)
    if spec.delta_net is not None:
        widths.append(spec.delta_net.num_key_heads)
    return not any(width % tp for width in widths)


def in_gb(num_bytes: float) -> str:
    """Return gigabytes, rounded up to whole ones."""
    return f"{-(-num_bytes // GB):.0f}"
