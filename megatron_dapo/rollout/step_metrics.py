"""What one rollout step reports: statistics of all generated samples, and of those handed to the trainer."""

from collections.abc import Iterable

from megatron_dapo.rollout.group_queue import RolloutStep, staleness


def step_metrics(step: RolloutStep, weight_version: int, num_retries: int, seconds: float) -> dict[str, float]:
    """Return flat floats.

    `dapo/`, `reward/`, `response_length/`, `prompt_length/`: over ALL samples generated in this step,
    kept or not, see `StepStatistics`; `train/`: over the samples handed to the trainer, replayed ones too.

    A mean over nothing (a step filled by surplus alone) is left out.
    """
    trained = [sample for group in step.groups for sample in group.samples]
    generated = step.generated.metrics()
    return {
        **_sampling_metrics(step),
        **generated,
        **mean_metrics("train/reward_mean", (sample.reward for sample in trained)),
        **mean_metrics("train/accuracy", (sample.correct for sample in trained)),
        "rollout/seconds": seconds,
        "rollout/tokens_per_s": generated["rollout/num_tokens"] / seconds,
        "rollout/num_retries": num_retries,
        "rollout/num_groups": len(step.groups),
        "rollout/num_groups_discarded": step.num_discarded,
        "rollout/num_surplus_groups_used": step.num_surplus_used,
        "rollout/staleness_max": max((staleness(group, weight_version) for group in step.groups), default=0),
    }


def mean_metrics(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return {name: mean of values}; {} where there are none."""
    numbers = list(values)
    return {name: sum(numbers) / len(numbers)} if numbers else {}


def _sampling_metrics(step: RolloutStep) -> dict[str, float]:
    num_filtered_groups = sum(step.filtered.values())
    num_judged = step.generated.num_judged_samples
    return {
        "dapo/num_gen_batches": step.num_gen_batches,
        "dapo/num_kept_groups": step.generated.num_groups - num_filtered_groups,
        "dapo/num_filtered_groups": num_filtered_groups,
        "dapo/num_filtered_samples": step.num_filtered_samples,
        **({"dapo/filter_ratio": step.num_filtered_samples / num_judged} if num_judged else {}),
        "dapo/filtered_all_correct": step.filtered["all_correct"],
        "dapo/filtered_all_incorrect": step.filtered["all_incorrect"],
        "dapo/filtered_uniform": step.filtered["uniform"],
    }
