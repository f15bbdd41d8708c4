"""Keys that were given, but that another key keeps from being read: what `ActsIf` of the schema's fields says."""

from collections.abc import Collection, Iterator
from typing import Any

from megatron_dapo.config.keys import Key, known_keys, show_text, value_of, was_left_off
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.schema.rules import ActsIf, Condition, Is, IsNot, IsOn


def unused_keys(config: Config, overridden: Collection[str] = ()) -> Iterator[Mistake]:
    """Yield a mistake for every key that is not at its default and has no effect.

    overridden: keys that the command line gives. Who writes one there means it now, whoever switched it off, and also
    at its default: that is a mistake, too. But null, false and 0 ask for nothing; and where no switch is off, a
    default takes back what a recipe says.
    """
    for key in known_keys().values():
        value = value_of(config, key.name)
        is_meant = key.name in overridden and bool(value)
        if value == key.default and not is_meant:
            continue
        asked: tuple[str, ...] = ()
        for rule in sorted(key.rules.acts_if, key=_is_switch, reverse=True):
            asked += tuple(condition.key for condition in rule.conditions)
            if _holds(rule, config):
                continue
            if _is_switch(rule):
                is_mistake = is_meant or (value is not None and _was_forgotten(rule, config))
            else:
                is_mistake = value != key.default
            if is_mistake:
                yield _mistake(key, value, rule, asked, config)
            break


def _is_switch(rule: ActsIf) -> bool:
    return any(isinstance(condition, IsOn) for condition in rule.conditions)


def _holds(rule: ActsIf, config: Config) -> bool:
    return any(condition.holds(value_of(config, condition.key)) for condition in rule.conditions)


def _was_forgotten(rule: ActsIf, config: Config) -> bool:
    """Return whether nobody touched the switches of a rule."""
    for condition in rule.conditions:
        section, _, switch = condition.key.rpartition(".")
        if not was_left_off(value_of(config, section), switch):
            return False
    return True


def _mistake(key: Key, value: Any, rule: ActsIf, asked: tuple[str, ...], config: Config) -> Mistake:
    states = [f"{condition.key} is {show_text(value_of(config, condition.key))}" for condition in rule.conditions]
    cures = [_cure(condition) for condition in rule.conditions]
    text = (
        f"{key.name} is {show_text(value)}, but has no effect while {' and '.join(states)}; "
        f"set {', or '.join(cures)}, or remove {key.name.rpartition('.')[2]}."
    )
    return Mistake((key.name, *asked), text)


def _cure(condition: Condition) -> str:
    """Return what to set, and to what, for the condition to hold."""
    name = condition.key.rpartition(".")[2]
    match condition:
        case Is(values=values):
            return f"{name} to {' or '.join(map(show_text, values))}"
        case IsOn():
            return f"{name} to true"
        case IsNot():
            return name
