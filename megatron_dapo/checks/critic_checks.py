"""Checks of the critic's keys against each other, the actor's keys and the critic's config.json."""

from collections.abc import Iterator
from typing import Any

from megatron_dapo.checks.known_mistakes import Check, known_mistakes
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
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.experts import num_experts_of


def mini_batches(config: Config) -> Iterator[str]:
    size = config.critic.ppo_mini_batch_size
    if not uses_critic(config) or size is None:
        return
    groups = config.data.train_batch_size
    if groups % size:
        yield (
            f"critic.ppo_mini_batch_size is {size}, which does not divide data.train_batch_size {groups}; choose a "
            f"divisor of {groups}, or null for the actor's."
        )


def _micro_batches(config: Config) -> Iterator[str]:
    cap = config.critic.max_tokens_per_microbatch
    if uses_critic(config) and cap is not None:
        cure = "raise it, or set null for the actor's"
        yield from fits_longest_sample(config, "critic.max_tokens_per_microbatch", cap, cure)


def _learning_rate(config: Config) -> Iterator[str]:
    optim = config.critic.optim
    if uses_critic(config) and optim.min_lr > optim.lr:
        yield f"critic.optim.min_lr is {optim.min_lr:g}, above critic.optim.lr {optim.lr:g}; lower it."


def _warm_up(config: Config) -> Iterator[str]:
    warmup = config.critic.optim.lr_warmup_steps
    steps = config.trainer.total_training_steps
    if uses_critic(config) and warmup >= steps:
        yield (
            f"critic.optim.lr_warmup_steps is {warmup}, but must be below trainer.total_training_steps {steps}, or the "
            f"critic's learning rate never reaches its peak."
        )


def _critic_first(config: Config) -> Iterator[str]:
    if not uses_critic(config):
        return
    alone = config.trainer.critic_warmup
    steps = config.trainer.total_training_steps
    if alone >= steps:
        yield (
            f"trainer.critic_warmup is {alone}, but must be below trainer.total_training_steps {steps}, or the policy "
            f"is never updated."
        )
        return
    warmup = config.actor_rollout_ref.actor.optim.lr_warmup_steps
    if steps - alone <= warmup < steps:
        yield (
            f"actor_rollout_ref.actor.optim.lr_warmup_steps is {warmup}, but trainer.critic_warmup {alone} leaves the "
            f"policy {steps - alone} of the {steps} rollout steps, and its learning rate never reaches its peak; lower "
            f"one of the two."
        )


def own_model(config: Config, actor_json: dict[str, Any]) -> Iterator[str]:
    """Check a critic of another size like the actor's model, and demand the same tokens."""
    path = config.critic.model.path
    critic_json = model_json_of(path) if path and uses_critic(config) else None
    if critic_json is None:
        return
    checks: tuple[Check, ...] = (divisible_by_tp, pipeline, positions, fp8)
    if num_experts_of(critic_json):
        checks = (*checks, experts)
    for mistake in known_mistakes(checks, config, critic_json):
        yield f"critic.model.path {path}: {mistake}"
    actor_size = actor_json.get("vocab_size")
    critic_size = critic_json.get("vocab_size")
    if actor_size != critic_size:
        yield (
            f"critic.model.path is {path}, whose vocab_size is {critic_size}, but the actor's is {actor_size}: both "
            f"must read the same tokens; choose a critic of the actor's family."
        )


CRITIC_CHECKS = (mini_batches, _micro_batches, _learning_rate, _warm_up, _critic_first)
