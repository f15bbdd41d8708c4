"""What low-rank adapters demand of the other keys."""

from collections.abc import Iterator

from megatron_dapo.config.derived import uses_critic
from megatron_dapo.config.key_names import ESTIMATOR, LORA_RANK, MEGATRON, TARGET_MODULES
from megatron_dapo.config.keys import show_text
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.lora_settings import ALL_LINEAR, LINEAR_MODULES, target_modules


def targets(config: Config) -> Iterator[Mistake]:
    """Yield a mistake where a module does not exist, or none is named."""
    model = config.actor_rollout_ref.model
    if not model.lora_rank:
        return
    known = f"{', '.join(LINEAR_MODULES)}, or {ALL_LINEAR} for all of them"
    names = target_modules(config)
    unknown = [name for name in names if name not in LINEAR_MODULES]
    if unknown or not names:
        what = f"has {', '.join(unknown)}, of which a layer has none" if unknown else "names no module"
        yield Mistake(
            (TARGET_MODULES, LORA_RANK),
            f"{TARGET_MODULES} {what}; choose from {known}.",
        )


def not_with(config: Config) -> Iterator[Mistake]:
    """Yield a mistake for what no test has tried together with adapters."""
    rank = config.actor_rollout_ref.model.lora_rank
    megatron = config.actor_rollout_ref.actor.megatron
    if not rank:
        return
    if uses_critic(config):
        yield Mistake(
            (LORA_RANK, ESTIMATOR),
            f"{LORA_RANK} is {rank}, but {ESTIMATOR} gae trains a critic, which has no adapters; set lora_rank to 0, "
            f"or choose an estimator without a critic.",
        )
    others = {"fp8": ("none", megatron.fp8), "tp_comm_overlap": (False, megatron.tp_comm_overlap)}
    for name, (off, value) in others.items():
        if value != off:
            yield Mistake(
                (LORA_RANK, f"{MEGATRON}.{name}"),
                f"{MEGATRON}.{name} is {show_text(value)}, which adapters ({LORA_RANK} {rank}) do not have yet; set "
                f"{name} to {show_text(off)}, or lora_rank to 0.",
            )


LORA_CHECKS = (targets, not_with)
