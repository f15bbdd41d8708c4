"""GPU memory of a server before its start, and of a push of weights on shared GPUs."""

from dataclasses import dataclass

from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import ParallelSizes
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.memory import dtype_bytes, kept_by_server, num_parameters, weight_sync_bytes
from megatron_dapo.estimates.shared_gpus import kept_while_pushing, server_share
from megatron_dapo.huggingface.model_spec import ModelSpec


@dataclass(frozen=True)
class ServerParts:
    """Bytes per GPU of a server."""

    weights: int
    kv_cache: int  # the rest, for all tokens; below 0 if the weights do not fit
    kv_per_token: int  # of one token in its cache

    @property
    def num_tokens(self) -> int:
        return max(0, self.kv_cache // self.kv_per_token)


def server_memory(config: Config, spec: ModelSpec, critic: ModelSpec | None = None) -> ServerParts:
    """Return a server's share of the weights, in half precision, and its key-value cache. critic:
    the spec of a critic of another size, which may be kept on a shared GPU."""
    server = config.actor_rollout_ref.rollout.server
    width = dtype_bytes(config)
    tp = server.tensor_model_parallel_size
    whole = sum(num_parameters(spec, ParallelSizes(tp=1, pp=1, vpp=None, world=1), stage=0))
    weights = whole * width // tp
    per_token = spec.num_layers * cache_width(spec, tp) * width
    left = int(server_share(config, spec, critic) * config.trainer.gpu_memory_gb * GB) - weights
    if server.max_total_tokens is not None:
        left = min(left, server.max_total_tokens * per_token)
    return ServerParts(weights, left, per_token)


def cache_width(spec: ModelSpec, tp: int) -> int:
    """Return the numbers per token and layer on a server's GPU: 2 x KV heads (at least one) x dim
    (arXiv 2309.06180, section 3). Latent attention has the vector and the rotated key, whole on
    each GPU (arXiv 2405.04434, section 2.1.3)."""
    if spec.latent is not None:
        return spec.latent.kv_rank + spec.latent.rotary_dim
    return 2 * max(1, spec.num_kv_heads // tp) * spec.head_dim


def push_memory(config: Config, actor: ModelSpec, critic: ModelSpec | None = None) -> float:
    """Return the bytes of a shared GPU during a push: weights of both sides, buckets, and what each
    side always keeps."""
    trainer = kept_while_pushing(config, actor, critic) + weight_sync_bytes(config, actor)
    return trainer + server_memory(config, actor, critic).weights + kept_by_server(config)
