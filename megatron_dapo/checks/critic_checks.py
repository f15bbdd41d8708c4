"""What the critic's keys demand of each other, of the actor's, and of the critic's own config.json."""

from collections.abc import Iterator
from typing import Any

from megatron_dapo.checks.length_checks import fits_longest_sample
from megatron_dapo.checks.model_checks import (
    divisible_by_tp,
    experts,
    fp8,
    model_json_of,
    pipeline,
    positions,
)
from megatron_dapo.config.derived import uses_critic
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.experts import num_experts_of


def batching(config: Config) -> Iterator[Mistake]:
    if not uses_critic(config):
        return
    groups = config.data.train_batch_size
    critic = config.critic
    if critic.ppo_mini_batch_size and groups % critic.ppo_mini_batch_size:
        yield Mistake(
            ("critic.ppo_mini_batch_size", "data.train_batch_size"),
            f"critic.ppo_mini_batch_size is {critic.ppo_mini_batch_size}, which does not divide data.train_batch_size "
            f"{groups}; choose a divisor of {groups}, or null for the actor's.",
        )
    if critic.max_tokens_per_microbatch:
        cure = "raise it, or set null for the actor's"
        key = "critic.max_tokens_per_microbatch"
        yield from fits_longest_sample(config, key, critic.max_tokens_per_microbatch, cure)


def schedule(config: Config) -> Iterator[Mistake]:
    if not uses_critic(config):
        return
    optim = config.critic.optim
    trainer = config.trainer
    if optim.min_lr > optim.lr:
        yield Mistake(
            ("critic.optim.min_lr", "critic.optim.lr"),
            f"critic.optim.min_lr is {optim.min_lr:g}, above critic.optim.lr {optim.lr:g}; lower it.",
        )
    if optim.lr_warmup_steps >= trainer.total_training_steps:
        yield Mistake(
            ("critic.optim.lr_warmup_steps", "trainer.total_training_steps"),
            f"critic.optim.lr_warmup_steps is {optim.lr_warmup_steps}, but must be below trainer.total_training_steps "
            f"{trainer.total_training_steps}, or the critic's learning rate never reaches its peak.",
        )
    if trainer.critic_warmup >= trainer.total_training_steps:
        yield Mistake(
            ("trainer.critic_warmup", "trainer.total_training_steps"),
            f"trainer.critic_warmup is {trainer.critic_warmup}, but must be below trainer.total_training_steps "
            f"{trainer.total_training_steps}, or the policy is never updated.",
        )
        return
    warmup = config.actor_rollout_ref.actor.optim.lr_warmup_steps
    steps = trainer.total_training_steps
    if steps - trainer.critic_warmup <= warmup < steps:
        yield Mistake(
            ("actor_rollout_ref.actor.optim.lr_warmup_steps", "trainer.critic_warmup", "trainer.total_training_steps"),
            f"actor_rollout_ref.actor.optim.lr_warmup_steps is {warmup}, but trainer.critic_warmup "
            f"{trainer.critic_warmup} leaves the policy {steps - trainer.critic_warmup} of the {steps} rollout steps, "
            f"and its learning rate never reaches its peak; lower one of the two.",
        )


def own_model(config: Config, actor_json: dict[str, Any]) -> Iterator[Mistake]:
    """Ask of a critic of another size than the actor's what is asked of the actor's model, and the same tokens."""
    path = config.critic.model.path
    critic_json = model_json_of(path) if path and uses_critic(config) else None
    if critic_json is None:
        return
    checks = (divisible_by_tp, pipeline, positions, fp8)
    for check in (*checks, experts) if num_experts_of(critic_json) else checks:
        for mistake in check(config, critic_json):
            yield Mistake(("critic.model.path", *mistake.keys), f"critic.model.path {path}: {mistake.text}")
    actor_size = actor_json.get("vocab_size")
    critic_size = critic_json.get("vocab_size")
    if actor_size != critic_size:
        yield Mistake(
            ("critic.model.path", "actor_rollout_ref.model.path"),
            f"critic.model.path is {path}, whose vocab_size is {critic_size}, but the actor's is {actor_size}: both "
            f"must read the same tokens; choose a critic of the actor's family.",
        )


CRITIC_CHECKS = (batching, schedule)
