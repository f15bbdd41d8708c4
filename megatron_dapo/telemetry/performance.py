"""How well a step used its GPUs: memory, MFU, tokens per second and GPU. What is not known is left out."""

from collections.abc import Mapping, Sequence

from megatron_dapo.common.sizes import GIB
from megatron_dapo.config.schema import Config
from megatron_dapo.data.types import Group
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.planner.flops import TRAINING_PASSES, forward_flops

# Dense bfloat16 tensor-core TFLOP/s of NVIDIA's data sheets, by the name that the driver gives; the first that fits.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.5,
    "H200": 989.5,
    "H100 PCIe": 756.5,
    "H100 NVL": 835.5,
    "H100": 989.5,
    "H800 PCIe": 756.5,
    "H800": 989.5,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
}


def peak_flops(gpu_name: str) -> float | None:
    """Return the GPU's peak in FLOP per second, in bfloat16, or None for a GPU that is not in the table."""
    words = gpu_name.replace("-", " ").split()
    return next((peak * 1e12 for name, peak in PEAK_TFLOPS.items() if _follows(name.split(), words)), None)


def _follows(name: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether a name's words are all there in this order. Others may stand between them: A100 80GB PCIe is an
    A100 PCIe."""
    rest = iter(words)
    return all(word in rest for word in name)


def memory_metrics(allocated_and_reserved: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return the highest allocated and the highest reserved peak in GiB, from every rank's peaks in bytes."""
    allocated, reserved = map(max, zip(*allocated_and_reserved, strict=True))
    return {"perf/max_memory_allocated_gib": allocated / GIB, "perf/max_memory_reserved_gib": reserved / GIB}


def trainer_metrics(
    spec: ModelSpec, groups: Sequence[Group], num_passes: int, seconds: float, num_gpus: int, peak: float | None
) -> dict[str, float]:
    """Return the metrics of the update alone, which goes num_passes times (epochs) over the samples as they are, in
    `seconds` seconds. `peak` is the FLOP/s of one GPU in the model's dtype, where it is known. Steps without an update
    have no such metrics."""
    if not seconds or not num_passes:
        return {}
    samples = [sample for group in groups for sample in group.samples]
    lengths = [sample.num_tokens for sample in samples]
    metrics = {"perf/update_tokens_per_s_per_gpu": num_passes * sum(lengths) / seconds / num_gpus}
    if peak is not None:
        num_answered = sum(sum(sample.loss_mask) for sample in samples)
        flops = num_passes * TRAINING_PASSES * forward_flops(spec, lengths, num_answered)
        metrics["perf/mfu"] = flops / (seconds * num_gpus * peak)
    return metrics


def server_metrics(config: Config, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the servers' metrics, computed from the rollout's. The number of GPUs per server is that of the config. A
    replay has no servers and therefore no such metrics."""
    if config.trainer.replay or not metrics.get("rollout/num_servers"):
        return {}
    gpus = metrics["rollout/num_servers"] * config.actor_rollout_ref.rollout.server.tensor_model_parallel_size
    return {"perf/rollout_tokens_per_s_per_gpu": metrics["rollout/tokens_per_s"] / gpus}
