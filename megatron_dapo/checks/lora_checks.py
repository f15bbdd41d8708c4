"""Demands of low-rank adapters on the other keys."""

from collections.abc import Iterator

from megatron_dapo.config.derived import uses_critic
from megatron_dapo.config.key_names import ESTIMATOR, LORA_RANK, MEGATRON, TARGET_MODULES
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.lora_settings import ALL_LINEAR, LINEAR_MODULES, target_modules


def _targets(config: Config) -> Iterator[str]:
    """Yield a mistake for unknown modules, or for none."""
    model = config.actor_rollout_ref.model
    if not model.lora_rank:
        return
    known = f"{', '.join(LINEAR_MODULES)}, or {ALL_LINEAR} for all of them"
    names = target_modules(config)
    unknown = [name for name in names if name not in LINEAR_MODULES]
    if unknown or not names:
        what = f"has {', '.join(unknown)}, of which a layer has none" if unknown else "names no module"
        yield f"{TARGET_MODULES} {what}; choose from {known}."


def _no_critic(config: Config) -> Iterator[str]:
    rank = config.actor_rollout_ref.model.lora_rank
    if rank and uses_critic(config):
        yield (
            f"{LORA_RANK} is {rank}, but {ESTIMATOR} gae trains a critic, which has no adapters; set lora_rank to 0, "
            f"or choose an estimator without a critic."
        )


def _no_fp8(config: Config) -> Iterator[str]:
    rank = config.actor_rollout_ref.model.lora_rank
    fp8 = config.actor_rollout_ref.actor.megatron.fp8
    if rank and fp8 != "none":
        yield (
            f"{MEGATRON}.fp8 is {fp8}, which adapters ({LORA_RANK} {rank}) do not have yet; set fp8 to none, or "
            f"lora_rank to 0."
        )


def _no_user_buffers(config: Config) -> Iterator[str]:
    rank = config.actor_rollout_ref.model.lora_rank
    if rank and config.actor_rollout_ref.actor.megatron.tp_comm_overlap:
        yield (
            f"{MEGATRON}.tp_comm_overlap is true, which adapters ({LORA_RANK} {rank}) do not have yet; set "
            f"tp_comm_overlap to false, or lora_rank to 0."
        )


LORA_CHECKS = (_targets, _no_critic, _no_fp8, _no_user_buffers)
