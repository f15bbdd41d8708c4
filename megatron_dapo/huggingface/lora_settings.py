"""The config's low-rank adapters (LoRA, arXiv 2106.09685): their linear modules and their rank."""

from dataclasses import dataclass

from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.model_families import FAMILIES

ALL_LINEAR = "all-linear"
LINEAR_MODULES = tuple(
    dict.fromkeys(name for family in FAMILIES.values() for row in family.rows for name in row.modules)
)
"""The meaning of `all-linear`, as far as a family has it.

A layer's linear modules by their Hugging Face names.
"""


@dataclass(frozen=True)
class LoraSettings:
    """The adapters of a run.

    A module's weight W becomes W + alpha / rank x B A, with A [rank, in] and B [out, rank].
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]  # last names of the modules, if a layer has them
    seed: int  # of the random A

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def is_target(self, weight_name: str) -> bool:
        """Return whether a Hugging Face tensor, by its name, is the weight of an adapted module."""
        *_, module, kind = ["", *weight_name.split(".")]
        return kind == "weight" and module in self.targets


def lora_settings(config: Config) -> LoraSettings | None:
    """Return the adapters trained by a run; None if it trains the whole model."""
    model = config.actor_rollout_ref.model
    if not model.lora_rank:
        return None
    return LoraSettings(model.lora_rank, model.lora_alpha, target_modules(config), config.trainer.seed)


def target_modules(config: Config) -> tuple[str, ...]:
    """Return the names of the key's modules, in the layer's order; unknown ones come last."""
    names = config.actor_rollout_ref.model.target_modules
    if names == ALL_LINEAR:
        return LINEAR_MODULES
    asked = [names] if isinstance(names, str) else names
    known = [name for name in LINEAR_MODULES if name in asked]
    return tuple(dict.fromkeys([*known, *asked]))


def actor_is_reference(config: Config) -> bool:
    """Return whether the actor without its adapters is the reference: then one model is enough."""
    references = config.actor_rollout_ref
    return bool(references.model.lora_rank) and references.ref.path is None
