"""The config keys that may differ between a checkpoint's run and the run resumed from it."""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import uses_critic, uses_kl_in_reward
from megatron_dapo.config.key_names import ACTOR
from megatron_dapo.config.keys import known_keys, may_change_on_resume
from megatron_dapo.config.schema.config import Config

_STEPS = "trainer.total_training_steps"


@dataclass(frozen=True)
class ConfigChange:
    """One key with a changed value. Values are JSON, or None if the key did not exist."""

    key: str
    before: str | None
    now: str | None

    def __str__(self) -> str:
        return f"{self.key} {self.before or 'not there'} -> {self.now or 'not there'}"


def config_to_plain(config: Config) -> dict:
    """Return the config in the form that checkpoints store. A null that another key decides is
    replaced by its meaning."""
    plain = config.model_dump(mode="json")
    plain["algorithm"]["use_kl_in_reward"] = uses_kl_in_reward(config)
    return plain


def config_hash(config: Config) -> str:
    """Return a hash, the same for equal configs on any machine."""
    return hashlib.sha256(json.dumps(config_to_plain(config), sort_keys=True).encode()).hexdigest()


def config_changes(before: dict, now: Config) -> list[ConfigChange]:
    """Return every key that differs. before: `config_to_plain` of the run that wrote the
    checkpoint.

    A key that this version of the program has and the other version did not have is no difference
    while it is at its default.
    """
    old = _leaves(before)
    new = _leaves(config_to_plain(now))
    defaults = _leaves(config_to_plain(Config()))
    changes = [ConfigChange(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]
    return [change for change in changes if change.before is not None or change.now != defaults[change.key]]


def check_changes(changes: list[ConfigChange], now: Config, accepted: Collection[str], source: str) -> None:
    """Raise UserError, a sentence per key, for changes that matter and are not accepted."""
    refused = [change for change in changes if matters(change, now) and change.key not in accepted]
    if refused:
        raise UserError(_refusal(change, now, accepted, source) for change in refused)


def matters(change: ConfigChange, now: Config) -> bool:
    """Return whether the change affects learning.

    The length of the run does so if the learning rate decays over it.
    """
    if change.key == _STEPS:
        return bool(_decaying(now))
    if change.key == f"{ACTOR}.calculate_entropy" and now.actor_rollout_ref.actor.loss_function:
        return True  # the function is given the entropy, or not
    return not may_change_on_resume(change.key)


def _decaying(config: Config) -> list[str]:
    """Return the keys that make a learning rate depend on the length of the run."""
    optims = {"actor_rollout_ref.actor.optim": config.actor_rollout_ref.actor.optim}
    if uses_critic(config):
        optims["critic.optim"] = config.critic.optim
    return [f"{name}.lr_decay_style" for name, optim in optims.items() if optim.lr_decay_style != "constant"]


def _refusal(change: ConfigChange, now: Config, accepted: Collection[str], source: str) -> str:
    why = f", over which the learning rate decays ({', '.join(_decaying(now))})" if change.key == _STEPS else ""
    keys = ", ".join([*accepted, change.key])
    if change.now is None:
        return (
            f"{change.key} was {change.before} in the run that wrote {source}, and this program has no such key; use "
            f"the program that wrote it, or accept the change with trainer.accept_changes=[{keys}]."
        )
    before = change.before or "not there"
    return (
        f"{change.key} is {change.now}, but was {before} in the run that wrote {source}{why}: it would be another run; "
        f"set it back, accept the change with trainer.accept_changes=[{keys}], or choose another trainer.run_dir."
    )


def _leaves(tree: dict, prefix: str = "") -> dict[str, str]:
    """Return the leaves of the tree: dotted key -> value as JSON."""
    leaves: dict[str, str] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and not _is_mapping(key):
            leaves |= _leaves(value, f"{key}.")
        else:
            leaves[key] = json.dumps(value, sort_keys=True)
    return leaves


def _is_mapping(name: str) -> bool:
    """Return whether a key holds names of the user's own: it is one value."""
    key = known_keys().get(name)
    return key is not None and key.is_mapping
