"""Evaluation: several answers per prompt as records, with the raw reward, and their metrics."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from megatron_dapo.algorithms.answer_metrics import scores
from megatron_dapo.common.rollout_errors import NeedsSync
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Group, Prompt, Sample
from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.rollout.sampling import Sampler, run_all
from megatron_dapo.rollout.verdicts import VerdictCheck
from megatron_dapo.servers.client import SamplingParams

# answers: after failures on all of these a reward function is not asked about the others
_EARLY = 32


async def sample_answers(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    config: Config,
    rewards: RewardPool,
    step: int,
    on_answer: Callable[[Group, Sample], None],
    done: Sequence[Mapping] = (),
    on_lost_weights: Callable[[NeedsSync], Awaitable[None]] | None = None,
) -> None:
    """Sample and score `rollout.val_n` responses per prompt at `val_temperature` (0 = greedy).

    No shaping, nothing is filtered.

    Args:
        sampler, rewards: of the run.
        prompts: to answer.
        config: of the run.
        step: rollout steps that the weights have learned from; each step's answers have seeds of
            their own.
        on_answer: called with each answer as soon as it is scored, and the prompt as a group.
        done: the records of the answers so far; their verdicts count too.
        on_lost_weights: called before a new try if no server has the weights; without it NeedsSync
            is raised.

    Raises TooFewVerdicts.
    """
    rollout = config.actor_rollout_ref.rollout
    params = SamplingParams(
        max_new_tokens=config.data.max_response_length,
        temperature=rollout.val_temperature,
        top_p=rollout.val_top_p,
        stop_token_ids=tuple(rollout.stop_token_ids),
    )
    verdicts = verdicts_of(done, config)
    numbers: dict[int, set[int]] = defaultdict(set)  # prompt -> its answers
    for record in done:
        numbers[record["prompt_index"]].add(record["number"])
    num_answers = 0

    async def sample(prompt: Prompt) -> None:
        group = Group(uid=f"val-{step}-{prompt.index}", prompt=prompt)
        answered = numbers[prompt.index]

        def note(answer: Sample) -> None:
            nonlocal num_answers
            answered.add(answer.number)
            verdicts.count([answer])
            num_answers += 1
            on_answer(group, answer)
            if num_answers == _EARLY:
                verdicts.check_all_failed(rewards.last_traceback)

        while not answered.issuperset(range(rollout.val_n)):
            try:
                await sampler.sample_group(group, rollout.val_n, params, note, elsewhere=answered)
            except NeedsSync as reason:
                if on_lost_weights is None:
                    raise
                await on_lost_weights(reason)

    await run_all(map(sample, prompts))
    verdicts.check(rewards.last_traceback)


def verdicts_of(records: Sequence[Mapping], config: Config) -> VerdictCheck:
    """Return a check of an evaluation that has counted these answers."""
    verdicts = VerdictCheck(config.reward, "the held-out evaluation")
    verdicts.count_errors(record.get("reward_error") for record in records)
    return verdicts


def prompt_rows(records: Sequence[Mapping]) -> list[tuple[Mapping, dict[str, float]]]:
    """Return each prompt's first record and its answers' scores, in the order of the files.

    The scores are avg@n, pass@k, maj@n, reward, length (tokens), truncated. maj@n is left out if no
    record has an answer to vote with.

    records: of `answer_record`, in any order.
    """
    by_prompt: dict[int, list[Mapping]] = defaultdict(list)
    for record in records:
        by_prompt[record["prompt_index"]].append(record)
    has_votes = any(record["answer"] is not None for record in records)
    rows = []
    for _, answers in sorted(by_prompt.items()):
        row = scores([answer["answer"] for answer in answers], [answer["correct"] for answer in answers])
        row |= {
            "reward": _mean([answer["raw_reward"] for answer in answers]),
            "length": _mean([answer["num_tokens"] for answer in answers]),
            "truncated": _mean([answer["finish_reason"] != "stop" for answer in answers]),
        }
        shown = {name: value for name, value in row.items() if has_votes or not name.startswith("maj@")}
        rows.append((answers[0], shown))
    return rows


def by_source(rows: Sequence[tuple[Mapping, dict[str, float]]]) -> dict[str, list[dict[str, float]]]:
    """Return data source -> the scores of each of its prompts, the sources in their order."""
    sources: dict[str, list[dict[str, float]]] = defaultdict(list)
    for record, row in rows:
        sources[record["data_source"] or "unnamed"].append(row)
    return dict(sources)


def validation_metrics(records: Sequence[Mapping]) -> dict[str, float]:
    """Return the metrics of a held-out evaluation; {} without records.

    val/accuracy (avg@n), pass@k, maj@n, reward_mean (raw), response_length_mean, num_turns_mean,
    truncation_ratio, num_env_failures and num_prompts. With several data sources all means over
    prompts also come as val/SOURCE/...
    """
    if not records:
        return {}
    rows = prompt_rows(records)
    sources = by_source(rows)
    metrics = _means([row for _, row in rows])
    if len(sources) > 1:
        for source, some in sources.items():
            metrics |= {name.replace("val/", f"val/{source}/", 1): value for name, value in _means(some).items()}
    return metrics | {
        "val/num_turns_mean": _mean([record.get("num_turns", 1) for record in records]),
        "val/num_env_failures": sum(record["finish_reason"] in ("environment", "agent") for record in records),
        "val/num_prompts": len(rows),
    }


_NAMES = {
    "avg": "val/accuracy",
    "reward": "val/reward_mean",
    "length": "val/response_length_mean",
    "truncated": "val/truncation_ratio",
}


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name: _NAMES.get(name.partition("@")[0], f"val/{name}") for name in rows[0]}
    return {shown: _mean([row[name] for row in rows]) for name, shown in names.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
