"""What an estimate of GPU memory does not fit into, and the cure."""

from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import starts_servers
from megatron_dapo.config.schema import Config
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.planner.memory import kept_free, server_memory, trainer_memory, usable_memory, weight_sync_bytes

_ACTOR = "actor_rollout_ref.actor"
_MORE_RANKS = f"raise {_ACTOR}.megatron.tensor_model_parallel_size or pipeline_model_parallel_size"
CURES = {
    "weights": _MORE_RANKS,
    "gradients": _MORE_RANKS,
    "optimizer": f"{_MORE_RANKS}, or trainer.nnodes with use_distributed_optimizer, which shards it, or "
    f"{_ACTOR}.megatron.optimizer_offload_fraction",
    "activations": f"set {_ACTOR}.megatron.recompute_granularity=auto, or lower {_ACTOR}.max_tokens_per_microbatch",
    "log prob head": f"lower {_ACTOR}.log_prob_chunk_size, or (not fused) {_ACTOR}.max_tokens_per_microbatch",
    "weight sync": "lower weight_sync.bucket_size_mb",
    "reference": _MORE_RANKS,
    "critic": _MORE_RANKS,
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
            f"{_available(config)}; {_cure(largest, config, actor, missing)}."
        )
    if starts_servers(config):
        server = server_memory(config, actor)
        longest = config.data.max_prompt_length + config.data.max_response_length
        if server.num_tokens < longest:
            sentences.append(
                f"A server GPU would have {server.weights / GB:.1f} GB of weights and room for {server.num_tokens} "
                f"tokens, fewer than the {longest} of one prompt with its response (trainer.gpu_memory_gb "
                f"{available:g}); raise actor_rollout_ref.rollout.server.tensor_model_parallel_size."
            )
    return sentences


def _available(config: Config) -> str:
    whole = f"trainer.gpu_memory_gb {config.trainer.gpu_memory_gb:g}"
    if not (reserve := kept_free(config)):
        return whole
    return (
        f"the {usable_memory(config) / GB:.4g} GB that {whole} has beside {reserve / GB:g} GB kept free "
        f"(trainer.gpu_reserve_gb)"
    )


def _cure(part: str, config: Config, spec: ModelSpec, missing: float) -> str:
    """Return what makes a trainer GPU's largest part smaller. missing: bytes that the estimate is too large by."""
    if part == "weight sync":
        smallest = config.weight_sync.model_copy(update={"bucket_size_mb": 1})
        least = weight_sync_bytes(config.model_copy(update={"weight_sync": smallest}), spec)
        if weight_sync_bytes(config, spec) - least < missing:
            return f"tensors are gathered whole, so that smaller buckets do not suffice; {_MORE_RANKS}"
    return CURES[part]
