"""What one rollout step reports: statistics of all generated samples, and of those handed to the trainer."""

from collections.abc import Iterable

from megatron_dapo.rollout.group_queue import StepGroups, staleness


def step_metrics(result: StepGroups, weight_version: int, num_retries: int, seconds: float) -> dict[str, float]:
    """Flat floats. `dapo/`, `reward/`, `response_length/`, `prompt_length/`: over ALL samples generated in this step,
    kept or not, see `StepStatistics`; `train/`: over the samples handed to the trainer, replayed ones too.

    A mean over nothing (a step filled by surplus alone) is left out.
    """
    trained = [sample for group in result.groups for sample in group.samples]
    generated = result.generated.metrics()
    return {
        **_sampling_metrics(result),
        **generated,
        **mean_metrics("train/reward_mean", (sample.reward for sample in trained)),
        **mean_metrics("train/accuracy", (sample.correct for sample in trained)),
        "rollout/seconds": seconds,
        "rollout/tokens_per_s": generated["rollout/num_tokens"] / seconds,
        "rollout/num_retries": num_retries,
        "rollout/num_groups": len(result.groups),
        "rollout/num_groups_discarded": result.num_discarded,
        "rollout/num_surplus_groups_used": result.num_surplus_used,
        "rollout/staleness_max": max((staleness(group, weight_version) for group in result.groups), default=0),
    }


def mean_metrics(name: str, values: Iterable[float]) -> dict[str, float]:
    """{name: mean of values}; {} where there are none."""
    values = list(values)
    return {name: sum(values) / len(values)} if values else {}


def _sampling_metrics(result: StepGroups) -> dict[str, float]:
    num_filtered_groups, num_judged = sum(result.filtered.values()), result.generated.num_judged_samples
    return {
        "dapo/num_gen_batches": result.num_gen_batches,
        "dapo/num_kept_groups": result.generated.num_groups - num_filtered_groups,
        "dapo/num_filtered_groups": num_filtered_groups,
        "dapo/num_filtered_samples": result.num_filtered_samples,
        **({"dapo/filter_ratio": result.num_filtered_samples / num_judged} if num_judged else {}),
        "dapo/filtered_all_correct": result.filtered["all_correct"],
        "dapo/filtered_all_incorrect": result.filtered["all_incorrect"],
        "dapo/filtered_uniform": result.filtered["uniform"],
    }
