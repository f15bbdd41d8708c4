"""Held-out evaluation: answers to every prompt of `data.val_files`, scored by the raw reward."""

from collections.abc import Sequence

from megatron_dapo.config.schema import Config
from megatron_dapo.data.types import Group, Prompt
from megatron_dapo.rewards.pool import RewardPool
from megatron_dapo.rollout.client import SamplingParams
from megatron_dapo.rollout.sampling import Sampler, run_all
from megatron_dapo.rollout.step_metrics import mean_metrics
from megatron_dapo.rollout.verdicts import VerdictCheck


async def evaluate(
    sampler: Sampler, prompts: Sequence[Prompt], config: Config, rewards: RewardPool
) -> dict[str, float]:
    """Sample and score `rollout.val_n` responses per prompt at `val_temperature` (0 = greedy).

    No shaping, nothing is filtered.

    Returns val/accuracy, val/reward_mean (raw), val/response_length_mean, val/num_turns_mean, val/truncation_ratio over
    all responses, val/num_env_failures and val/num_prompts; {} without prompts.

    Raises UserError where too few responses got a verdict.
    """
    if not prompts:
        return {}
    rollout = config.actor_rollout_ref.rollout
    params = SamplingParams(
        max_new_tokens=config.data.max_response_length,
        temperature=rollout.val_temperature,
        top_p=rollout.val_top_p,
        stop_token_ids=tuple(rollout.stop_token_ids),
    )
    drawn = [Group(uid=f"val-{prompt.index}", prompt=prompt) for prompt in prompts]
    groups = await run_all(sampler.sample_group(group, rollout.val_n, params, shaping=None) for group in drawn)
    samples = [sample for group in groups for sample in group.samples]
    verdicts = VerdictCheck(config.reward, "the held-out evaluation")
    verdicts.count(samples)
    verdicts.check(rewards.last_traceback)
    return {
        **mean_metrics("val/accuracy", (sample.correct for sample in samples)),
        **mean_metrics("val/reward_mean", (sample.raw_reward for sample in samples)),
        **mean_metrics("val/response_length_mean", (sample.num_response_tokens for sample in samples)),
        **mean_metrics("val/num_turns_mean", (sample.num_turns for sample in samples)),
        **mean_metrics("val/truncation_ratio", (sample.is_truncated for sample in samples)),
        "val/num_env_failures": sum(sample.finish_reason == "environment" for sample in samples),
        "val/num_prompts": len(prompts),
    }
