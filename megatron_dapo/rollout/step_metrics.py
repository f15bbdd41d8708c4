"""What one rollout step reports: statistics of all generated samples, and of those handed to the trainer."""

from collections.abc import Iterable, Sequence

from megatron_dapo.data.types import Group, Sample
from megatron_dapo.rollout.group_queue import StepGroups

# metric -> reward_error of the samples that it counts
_REWARD_ERRORS = {"reward/num_timeouts": "timeout", "reward/num_crashes": "crash", "reward/num_exceptions": "exception"}


def step_metrics(result: StepGroups, weight_version: int, num_retries: int, seconds: float) -> dict[str, float]:
    """Flat floats. `dapo/`, `reward/`, `response_length/`, `prompt_length/`: over ALL samples generated in this step,
    kept or not, so that filtering does not colour them; `train/`: over the samples handed to the trainer. Replayed
    samples were not generated; they belong to the groups that are filtered, and to those that are trained on.

    A mean over nothing (a step filled by surplus alone) is left out.
    """
    judged = [sample for group in result.generated for sample in group.samples]
    generated = [sample for sample in judged if not sample.exp_mask]
    trained = [sample for group in result.groups for sample in group.samples]
    return {
        **_sampling_metrics(result, len(judged)),
        **_truncation_metrics(generated),
        **_reward_metrics(generated),
        **mean_metrics("train/reward_mean", (sample.reward for sample in trained)),
        **mean_metrics("train/accuracy", (sample.correct for sample in trained)),
        **mean_metrics("prompt_length/mean", (len(sample.prompt_tokens) for sample in judged)),  # as it was answered
        **_rollout_metrics(result, generated, weight_version, num_retries, seconds),
    }


def mean_metrics(name: str, values: Iterable[float]) -> dict[str, float]:
    """{name: mean of values}; {} where there are none."""
    values = list(values)
    return {name: sum(values) / len(values)} if values else {}


def _sampling_metrics(result: StepGroups, num_judged: int) -> dict[str, float]:
    num_filtered_groups = sum(result.filtered.values())
    num_kept_groups = len(result.generated) - num_filtered_groups
    num_filtered = result.num_filtered_samples
    return {
        "dapo/num_gen_batches": result.num_gen_batches,
        "dapo/num_kept_groups": num_kept_groups,
        "dapo/num_filtered_groups": num_filtered_groups,
        "dapo/num_filtered_samples": num_filtered,
        **({"dapo/filter_ratio": num_filtered / num_judged} if num_judged else {}),
        "dapo/filtered_all_correct": result.filtered["all_correct"],
        "dapo/filtered_all_incorrect": result.filtered["all_incorrect"],
        "dapo/filtered_uniform": result.filtered["uniform"],
    }


def _truncation_metrics(generated: Sequence[Sample]) -> dict[str, float]:
    truncated = [sample for sample in generated if sample.is_truncated]
    num_by_length = sum(sample.finish_reason == "length" for sample in truncated)
    return {
        "dapo/num_truncated_samples": len(truncated),
        "dapo/num_truncated_by_length": num_by_length,
        "dapo/num_truncated_by_termination": len(truncated) - num_by_length,
        **mean_metrics("dapo/truncation_ratio", (sample.is_truncated for sample in generated)),
        # what shaping added, over all samples: the soft interval punishes responses that were not truncated, too
        **mean_metrics(
            "dapo/avg_truncation_penalty_applied", (sample.reward - sample.raw_reward for sample in generated)
        ),
    }


def _reward_metrics(generated: Sequence[Sample]) -> dict[str, float]:
    errors = [sample.reward_error for sample in generated if sample.reward_error is not None]
    return {
        **mean_metrics("reward/mean", (sample.reward for sample in generated)),
        **mean_metrics("reward/raw_mean", (sample.raw_reward for sample in generated)),
        **mean_metrics("reward/accuracy", (sample.correct for sample in generated)),
        **{name: sum(error.startswith(prefix) for error in errors) for name, prefix in _REWARD_ERRORS.items()},
    }


def _rollout_metrics(
    result: StepGroups, generated: Sequence[Sample], weight_version: int, num_retries: int, seconds: float
) -> dict[str, float]:
    lengths = [sample.num_response_tokens for sample in generated]
    num_generated = sum(sum(sample.loss_mask) for sample in generated)  # an environment's tokens cost no sampling
    spread = {"response_length/min": min(lengths), "response_length/max": max(lengths)} if lengths else {}
    return {
        **mean_metrics("response_length/mean", lengths),
        **spread,
        "rollout/num_tokens": num_generated,
        "rollout/seconds": seconds,
        "rollout/tokens_per_s": num_generated / seconds,
        **mean_metrics("rollout/num_turns_mean", (sample.num_turns for sample in generated)),
        "rollout/num_env_failures": sum((sample.reward_error or "").startswith("environment") for sample in generated),
        "rollout/num_retries": num_retries,
        "rollout/num_groups": len(result.groups),
        "rollout/num_surplus_groups_used": result.num_surplus_used,
        "rollout/staleness_max": max((_staleness(group, weight_version) for group in result.groups), default=0),
    }


def _staleness(group: Group, weight_version: int) -> int:
    """Versions between the oldest token that was written for the group and weight_version."""
    new = (sample for sample in group.samples if not sample.exp_mask)
    versions = (version for sample in new for version in sample.weight_versions)
    return weight_version - min(versions, default=weight_version)
