"""How well a step used its ranks: memory, MFU, tokens per second, waiting. Unknown values are left
out.

A rank has one GPU, or is a process on a CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron_dapo.common.sizes import GIB
from megatron_dapo.config.derived import uses_servers
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Group
from megatron_dapo.huggingface.lora_settings import LoraSettings
from megatron_dapo.huggingface.model_spec import ModelSpec

WAITING = ("start", "rollout")
"""Phases of the trainer's waiting for servers and samples."""


class RankPeak(NamedTuple):
    """The most bytes of GPU memory that one trainer rank used, and the pipeline stage that it
    computes."""

    stage: int
    allocated: int
    reserved: int


class PhaseWork(NamedTuple):
    """The computation of one phase: num_passes over the step's samples."""

    flops: Callable[[ModelSpec, Sequence[int], int, LoraSettings | None], int]
    """Operations of one pass: `forward_flops` or `training_flops`."""
    num_passes: int
    seconds: float


def memory_metrics(peaks: Sequence[RankPeak]) -> dict[str, float]:
    """Return the highest allocated and the highest reserved peak in GiB, of all ranks and of each
    pipeline stage if there are several."""
    metrics = {
        "perf/max_memory_allocated_gb": max(peak.allocated for peak in peaks) / GIB,
        "perf/max_memory_reserved_gb": max(peak.reserved for peak in peaks) / GIB,
    }
    stages = sorted({peak.stage for peak in peaks})
    if len(stages) > 1:
        for stage in stages:
            of_stage = memory_metrics([peak for peak in peaks if peak.stage == stage])
            metrics |= {f"{name}/pp{stage}": value for name, value in of_stage.items()}
    return metrics


def mfu_metrics(
    spec: ModelSpec,
    lora: LoraSettings | None,
    groups: Sequence[Group],
    works: Mapping[str, PhaseWork],
    *,
    num_gpus: int,
    peak: float,
) -> dict[str, float]:
    """Return each phase's model FLOPs / (seconds x GPUs x peak), by metric; a phase without work
    has none.

    Args:
        groups: the FLOPs are those of their samples, without padding.
        lora: for adapters only.
        peak: FLOP/s of one GPU in the model's dtype.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths = [row.num_tokens for sample in samples for row in sample.branches]
    num_answered = sum(sample.num_written_tokens for sample in samples)
    return {
        name: work.num_passes * work.flops(spec, lengths, num_answered, lora) / (work.seconds * num_gpus * peak)
        for name, work in works.items()
        if work.num_passes and work.seconds
    }


def update_metrics(groups: Sequence[Group], num_epochs: int, seconds: float, num_ranks: int) -> dict[str, float]:
    """Return the speed of the update, num_epochs passes over the samples in `seconds`; {} for a
    step without an update."""
    if not seconds or not num_epochs:
        return {}
    return {"perf/update_tokens_per_s_per_gpu": num_epochs * _num_tokens(groups) / seconds / num_ranks}


def step_metrics(
    groups: Sequence[Group], step_s: float, waiting_s: float, num_trainer_ranks: int, num_server_ranks: int
) -> dict[str, float]:
    """Return the whole step's metrics.

    Args:
        step_s: seconds since the last record.
        waiting_s: the trainer's part of these in waiting for servers and samples.
    """
    num_tokens = _num_tokens(groups)
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/throughput": num_tokens / step_s / (num_trainer_ranks + num_server_ranks),
        "perf/trainer_waiting": waiting_s / step_s,
    }


def fine_tuning_metrics(
    lengths: Sequence[int], num_counted: int, *, update_s: float, step_s: float, num_ranks: int
) -> dict[str, float]:
    """Return the speed and the data of a fine-tuning step.

    Args:
        lengths: tokens of each conversation.
        num_counted: tokens with a loss.
        update_s: seconds of the optimizer step only.
    """
    num_tokens = sum(lengths)
    return {
        "data/num_counted_tokens": num_counted,
        "perf/total_num_tokens": num_tokens,
        "perf/throughput": num_tokens / step_s / num_ranks,
        "perf/update_tokens_per_s_per_gpu": num_tokens / update_s / num_ranks,
    }


def server_metrics(metrics: Mapping[str, float], num_server_ranks: int) -> dict[str, float]:
    """Return the speed of sampling, from the rollout's metrics. Without servers there is none."""
    if not num_server_ranks:
        return {}
    return {"perf/rollout_tokens_per_s_per_gpu": metrics["rollout/tokens_per_s"] / num_server_ranks}


def server_ranks(config: Config, metrics: Mapping[str, float]) -> int:
    """Return the number of the servers' ranks; 0 in a run without servers.

    It is the rollout's count of servers times the config's ranks per server.
    """
    if not uses_servers(config):
        return 0
    per_server = config.actor_rollout_ref.rollout.server.tensor_model_parallel_size
    return int(metrics.get("rollout/num_servers", 0)) * per_server


def _num_tokens(groups: Sequence[Group]) -> int:
    return sum(row.num_tokens for group in groups for sample in group.samples for row in sample.branches)
