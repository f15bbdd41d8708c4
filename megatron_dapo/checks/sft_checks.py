"""Checks across the keys of supervised fine-tuning (`sft.enable`)."""

from collections.abc import Iterator

from megatron_dapo.checks.config_checks import SHARED_CHECKS
from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.checks.length_checks import fits_longest_sample
from megatron_dapo.config.key_names import ACTOR, keys_of
from megatron_dapo.config.keys import Key, known_keys, show_text, value_of
from megatron_dapo.config.schema.config import Config

# sections and keys in use; all others have no effect
READ = (
    "sft",
    "actor_rollout_ref.model",
    f"{ACTOR}.optim",
    f"{ACTOR}.megatron",
    *keys_of(ACTOR, "max_tokens_per_microbatch", "log_prob_chunk_size", "fused_kernels", "calculate_entropy"),
    *keys_of("data", "train_files", "val_files", "prompt_key", "prompt_template", "train_batch_size"),
    *keys_of("data", "shuffle", "seed", "apply_chat_template"),
    "trainer",
)
NOT_READ = keys_of("trainer", "critic_warmup", "dump_batches", "replay", "synthetic_batch")


def is_read(key: str) -> bool:
    """Return whether supervised fine-tuning reads a key."""
    return key not in NOT_READ and any(key == name or key.startswith(f"{name}.") for name in READ)


def _unread_keys(config: Config) -> Iterator[str]:
    """Yield a mistake for every changed key of reinforcement learning."""
    for key in known_keys().values():
        if not is_read(key.name):
            yield from known_mistakes([_unread_key], config, key)


def _unread_key(config: Config, key: Key) -> Iterator[str]:
    value = value_of(config, key.name)
    if value != key.default:
        yield f"{key.name} is {show_text(value)}, but supervised fine-tuning (sft.enable) does not read it; remove it."


def lengths(config: Config) -> Iterator[str]:
    cap = config.actor_rollout_ref.actor.max_tokens_per_microbatch
    yield from fits_longest_sample(config, f"{ACTOR}.max_tokens_per_microbatch", cap)


SFT_CHECKS = (_unread_keys, lengths, *SHARED_CHECKS)
