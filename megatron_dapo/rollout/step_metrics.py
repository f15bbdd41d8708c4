"""The metrics of one rollout step: statistics of all generated samples, and of the trainer's."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megatron_dapo.data.samples import Group
from megatron_dapo.queue.step_statistics import RolloutStep
from megatron_dapo.servers.fleet import restart_bias_bound


def step_metrics(step: RolloutStep, weight_version: int, num_retries: int, seconds: float) -> dict[str, float]:
    """Return flat floats; a mean over nothing is left out.

    `dapo/`, `reward/`, `response_length/`, `prompt_length/`: over ALL samples generated for this
    step, kept or not, see `StepStatistics`. `train/`: over the samples handed to the trainer,
    replayed ones too.
    """
    trained = [sample for group in step.groups for sample in group.samples]
    generated = step.generated.metrics()
    return {
        **_sampling_metrics(step),
        **generated,
        **_mean_metrics("train/reward_mean", (sample.reward for sample in trained)),
        **_mean_metrics("train/accuracy", (sample.correct for sample in trained)),
        "rollout/seconds": seconds,
        "rollout/tokens_per_s": generated["rollout/num_tokens"] / seconds,
        "rollout/num_retries": num_retries,
        "rollout/num_groups": len(step.groups),
        "rollout/num_groups_discarded": step.num_discarded,
        "rollout/num_groups_ready": step.num_ready or 0,
        **_age_metrics(step.groups, weight_version),
    }


def restart_metrics(metrics: Mapping[str, float], num_restarts: int) -> dict[str, float]:
    """Return the largest share by which a step's restarts make responses shorter, if it has any.
    metrics: of the step."""
    num_tokens = metrics["rollout/num_tokens"]
    if not num_tokens:
        return {}
    mean, mean_square = metrics["response_length/mean"], metrics["response_length/mean_square"]
    # the seconds of a token cancel
    return {"rollout/restart_bias_bound": restart_bias_bound(num_restarts / num_tokens, 1.0, mean, mean_square)}


def _mean_metrics(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return {name: mean of values}; {} without values."""
    numbers = list(values)
    return {name: sum(numbers) / len(numbers)} if numbers else {}


def _age_metrics(groups: Sequence[Group], weight_version: int) -> dict[str, float]:
    """Return the ages of new tokens in weight versions; an environment's tokens do not count."""
    total = 0
    number = 0
    oldest = weight_version
    span = 0
    for sample in (sample for group in groups for sample in group.samples if not sample.exp_mask):
        versions = np.concatenate([branch.weight_versions[branch.loss_mask != 0] for branch in sample.branches])
        if len(versions):
            first = int(versions.min())
            total += int(versions.sum())
            number += len(versions)
            oldest = min(oldest, first)
            span = max(span, int(versions.max()) - first)
    return {
        "rollout/staleness_mean": weight_version - total / number if number else 0.0,
        "rollout/staleness_max": weight_version - oldest,
        "rollout/version_span_max": span,
    }


def row_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean and the largest number of the trainer's rows per trajectory of these groups."""
    numbers = [len(sample.branches) for group in groups for sample in group.samples]
    return _mean_metrics("agent/rows_mean", numbers) | {"agent/rows_max": max(numbers, default=0)}


def _sampling_metrics(step: RolloutStep) -> dict[str, float]:
    num_filtered_groups = sum(step.filtered.values())
    num_samples = step.generated.num_samples
    return {
        "dapo/num_gen_batches": step.num_gen_batches,
        "dapo/num_kept_groups": step.generated.num_groups - num_filtered_groups,
        "dapo/num_filtered_groups": num_filtered_groups,
        "dapo/num_filtered_samples": step.num_filtered_samples,
        **({"dapo/filter_ratio": step.num_filtered_samples / num_samples} if num_samples else {}),
        "dapo/filtered_all_correct": step.filtered["all_correct"],
        "dapo/filtered_all_incorrect": step.filtered["all_incorrect"],
        "dapo/filtered_uniform": step.filtered["uniform"],
        **({"dapo/filtered_own": step.filtered["own"]} if "own" in step.filtered else {}),
    }
